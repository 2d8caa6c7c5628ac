/* A row applied to an array in place: what `places.py` in perturbations describes. */

#include "xla.h"

enum { OFF, ZERO, SCALE };

/* apply(x, rows, index=) -> x, float32, where it lies. */
EXPORT void *nnx_inspector_apply(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    const float *from = x->data, *row = (const float *)frame->in.at[1]->data;
    float *to = frame->out.at[0]->data;
    row += 2 * whole_number(frame, 0);
    int64_t n = product(x->dims, x->rank);
    if (row[0] == ZERO)
        for (int64_t i = 0; i < n; i++) to[i] = 0;
    else if (row[0] == SCALE)
        for (int64_t i = 0; i < n; i++) to[i] = from[i] * row[1];
    else if (to != from)
        for (int64_t i = 0; i < n; i++) to[i] = from[i];
    return NULL;
}
