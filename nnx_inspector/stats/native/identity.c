/* Hands an array on: what `computed_once` in `_compat/native.py` describes. */

#include "xla.h"

/* once(x) -> x, in the same memory, so that there is nothing to do. */
EXPORT void *nnx_inspector_once(Frame *frame) {
    is_asked(frame);
    return NULL;
}
