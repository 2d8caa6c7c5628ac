/* Calling Python: what `_compat/host_calls.py` describes. */

#include "xla.h"

typedef void (*Function)(int32_t number, Buffer **in, Buffer **out);

enum { MOST = 1 << 16, INSTANTIATE = 0 };

static Function python;
static int32_t inside; /* how many calls of it there are now */
static int32_t calls[MOST]; /* of each number: how many calls of it the compiled programs hold */

static void let_go(void *of) { __atomic_sub_fetch((int32_t *)of, 1, __ATOMIC_SEQ_CST); }

static int64_t call_type; /* XLA's number for what `let_go` destroys */
static const TypeInfo call_info = {sizeof(TypeInfo), NULL, let_go};

/* How many numbers there are; `function` is what all of them call, none if it is NULL. */
EXPORT int32_t nnx_inspector_answer_with(Function function) {
    __atomic_store_n(&python, function, __ATOMIC_SEQ_CST);
    return MOST;
}

EXPORT int32_t nnx_inspector_calls_inside(void) {
    return __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
}

EXPORT int32_t nnx_inspector_calls_of(int32_t number) {
    return __atomic_load_n(&calls[number], __ATOMIC_SEQ_CST);
}

static void register_type(const Frame *frame) {
    static const char name[] = "nnx_inspector_call";
    TypeRegister type = {sizeof type, NULL, {name, sizeof name - 1}, &call_type, &call_info};
    frame->api->type_register(&type);
    frame->extension->metadata->state = call_type;
}

/* A program was compiled, or read from a file: it holds its call until it is destroyed. */
static void hold(const Frame *frame) {
    int32_t *of = &calls[whole_number(frame, 0)];
    StateSet set = {sizeof set, NULL, frame->context, frame->stage, &call_type, of};
    __atomic_add_fetch(of, 1, __ATOMIC_SEQ_CST);
    frame->api->state_set(&set); /* where this fails, the function stays for good */
}

static int64_t bytes_in(int32_t dtype) {
    switch (dtype) {
    case S16: case U16: case F16: case BF16: return 2;
    case S32: case U32: case F32: return 4;
    case S64: case U64: case F64: case C64: return 8;
    case C128: return 16;
    default: return 1;
    }
}

/* host(arrays, number=) -> arrays: what the Python function of this number makes of them, or zeros
 * where there is none, or it raises. */
EXPORT void *nnx_inspector_host(Frame *frame) {
    if (is_asked(frame)) {
        register_type(frame);
        return NULL;
    }
    if (frame->stage == INSTANTIATE) {
        hold(frame);
        return NULL;
    }
    for (int64_t i = 0; i < frame->out.count; i++) {
        const Buffer *out = frame->out.at[i];
        char *to = out->data;
        int64_t bytes = product(out->dims, out->rank) * bytes_in(out->dtype);
        for (int64_t j = 0; j < bytes; j++) to[j] = 0;
    }
    __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    Function function = __atomic_load_n(&python, __ATOMIC_SEQ_CST);
    if (function) function(whole_number(frame, 0), frame->in.at, frame->out.at);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    return NULL;
}
