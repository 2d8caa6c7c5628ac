/* Many arrays as one: what `packed.py` in program/editing describes. */

#include "xla.h"

/* join(arrays, rows=) -> words: each row's words of all arrays, one array after the other. */
EXPORT void *nnx_inspector_join(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *out = frame->out.at[0];
    int batch = whole_number(frame, 0);
    uint32_t *to = out->data;
    for (int64_t row = 0; row < product(out->dims, batch); row++)
        for (int64_t i = 0; i < frame->in.count; i++) {
            const Buffer *x = frame->in.at[i];
            int wide = x->dtype == F64 || x->dtype == S64 || x->dtype == U64;
            int64_t words = product(x->dims + batch, x->rank - batch) * (wide ? 2 : 1);
            const uint32_t *from = (const uint32_t *)x->data + row * words;
            for (int64_t j = 0; j < words; j++) *to++ = from[j];
        }
    return NULL;
}
