/* What a library has to have where it links no other. */

#include <stddef.h>

#ifdef _WIN32
int _fltused;
int DllMainCRTStartup(void *library, unsigned reason, void *reserved) {
    return library && (reason || reserved || 1);
}
#endif

/* A compiler may call these for a loop that fills or copies memory. */
__attribute__((no_builtin)) void *memset(void *to, int byte, size_t n) {
    for (char *at = to; n--;) *at++ = (char)byte;
    return to;
}
__attribute__((no_builtin)) void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    const char *next = from;
    for (char *at = to; n--;) *at++ = *next++;
    return to;
}
