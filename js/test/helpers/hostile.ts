// A hundred texts that a model's author, or what they load, could put into names, types, docs and
// errors: markup, script, style, templates, direction and control characters, prototype names.

const HACK = "window.hacked=1";
const MARKUP = [
  `<img src=x onerror="${HACK}">`, `<img/src=x onerror=${HACK}>`, `<script>${HACK}</script>`, `</script><script>${HACK}</script>`,
  `<svg onload=${HACK}>`, `<svg><script>${HACK}</script></svg>`, `<svg><a xlink:href="javascript:${HACK}"><text>x</text></a></svg>`,
  `<svg><animate onbegin=${HACK} attributeName=x dur=1s>`, `<iframe src="javascript:${HACK}">`, `<iframe srcdoc="<script>${HACK}</script>">`,
  `<object data="javascript:${HACK}">`, `<embed src="data:text/html,<script>${HACK}</script>">`, `<body onload=${HACK}>`,
  `<details open ontoggle=${HACK}>`, `<video><source onerror=${HACK}></video>`, `<audio src=x onerror=${HACK}>`, `<marquee onstart=${HACK}>`,
  `<input autofocus onfocus=${HACK}>`, `<select autofocus onfocus=${HACK}>`, `<textarea autofocus onfocus=${HACK}>`, `<form><button formaction=javascript:${HACK}>`,
  `<a href="javascript:${HACK}">x</a>`, `<a href="jAvAsCrIpT&colon;${HACK}">x</a>`, `<math><mi xlink:href="data:x,<script>${HACK}</script>">`,
  `<link rel=stylesheet href=//evil.example/x.css>`, `<style>*{background:url(//evil.example)}</style>`, `<style>@import '//evil.example'</style>`,
  `<meta http-equiv=refresh content="0;url=//evil.example">`, `<base href=//evil.example/>`, `<template><img src=x onerror=${HACK}></template>`,
  `<noscript><p title="</noscript><img src=x onerror=${HACK}>">`, `<!--<img src="--><img src=x onerror=${HACK}>">`, `<![CDATA[<img src=x onerror=${HACK}>]]>`,
  `"><img src=x onerror=${HACK}>`, `'><img src=x onerror=${HACK}>`, `\`><img src=x onerror=${HACK}>`, `" onmouseover="${HACK}`, `' onfocus='${HACK}' autofocus='`,
  `&lt;img src=x onerror=${HACK}&gt;`, `&#60;script&#62;${HACK}&#60;/script&#62;`, `<<img src=x onerror=${HACK}>`, `<x onclick=${HACK}>click</x>`, `<b>bold</b>`,
  `<table><td background="javascript:${HACK}">`, `<div style="background:url(javascript:${HACK})">`, `<isindex action=javascript:${HACK}>`, `<keygen autofocus onfocus=${HACK}>`,
  `<custom-element></custom-element>`, `<slot name=x>`, `<portal src=//evil.example>`,
]; // prettier-ignore
const SCRIPT = [
  `javascript:${HACK}`, `data:text/html,<script>${HACK}</script>`, `vbscript:${HACK}`, "blob:null/0", "//evil.example/x.png", "file:///etc/passwd",
  `\${${HACK}}`, `{{${HACK}}}`, `{{constructor.constructor('${HACK}')()}}`, `<%= ${HACK} %>`, `#{${HACK}}`, `{%${HACK}%}`, "`${alert(1)}`", "__import__('os')", "%s%n%x",
]; // prettier-ignore
const STYLE = [
  "expression(alert(1))", "x;background:url(//evil.example)", "}*{display:none}", "url(javascript:alert(1))", "var(--nni-text)", "@import '//evil.example'",
]; // prettier-ignore
const JSON_BREAKERS = [`"`, `\\`, `"}`, `"],"type":"state"`, "\u2028\u2029", `\\u003cimg\\u003e`, "null", "NaN"];
const CHARACTERS = [
  "\u202egnp.exe", "\u2066\u202e\u2069", "\u200f\u05d0\u05d1", "a\u0000b", "\u0000", "\u0007\u001b[31mred\u001b[0m", "\r\nSet-Cookie: x", "\t", "\ufeff", "\ufffd", "🧠".repeat(40),
  "👨‍👩‍👧‍👦", "Z̸̢͝a̷l̶g̵o̴", "\u00a0", "é".normalize("NFD"), "very-long-".repeat(500),
]; // prettier-ignore
const PROTOTYPE = ["__proto__", "constructor", "prototype", "toString", "hasOwnProperty", "__defineGetter__", "valueOf", "then", "length"];

export const EVIL: readonly string[] = [...MARKUP, ...SCRIPT, ...STYLE, ...JSON_BREAKERS, ...CHARACTERS, ...PROTOTYPE];

/** One of them for short: it would be seen to run. */
export const HOSTILE = `<img src=x onerror="window.hacked=true"><script>window.hacked=true</script>`;
