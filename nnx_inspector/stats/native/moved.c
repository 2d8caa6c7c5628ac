/* How far a parameter is moved: what `Moved` in program/editing/functions.py describes.
 *
 * XLA would make the new value once more within the loop that adds up, the optimizer's arithmetic
 * with it, and compile that loop for each parameter.
 */

#include "floats.h"

static const double UNIT = 0x1p-30;
enum { HALF = BLOCK / 2 }; /* of two arrays: a larger frame needs a function of C's own library */

typedef struct { double change, value; } Squares;

EVERYWHERE void add_block(const uint32_t *before, const uint32_t *after, int n, Squares *to) {
#pragma clang fp reassociate(on)
    double change = 0, value = 0;
    for (int i = 0; i < n; i++) {
        double old = (double)float_of(before[i]), d = (double)float_of(after[i]) - old;
        change += d * d, value += old * old;
    }
    to->change += change, to->value += value;
}
static void add_anywhere(const uint32_t *before, const uint32_t *after, int n, Squares *to) {
    add_block(before, after, n, to);
}
FASTER static void add_faster(const uint32_t *before, const uint32_t *after, int n, Squares *to) {
    add_block(before, after, n, to);
}

static void singles(const Buffer *before, const Buffer *after, int64_t at, int64_t n, Squares *to) {
    uint32_t old[HALF], new[HALF];
    Load *load = LOADS[before->dtype];
    int fast = is_fast(), plain = before->dtype == F32;
    for (int64_t done = 0; done < n; done += HALF) {
        int m = n - done < HALF ? (int)(n - done) : HALF;
        const uint32_t *a = (const uint32_t *)before->data + at + done;
        const uint32_t *b = (const uint32_t *)after->data + at + done;
        if (!plain) load(before->data, at + done, 1, m, old), a = old;
        if (!plain) load(after->data, at + done, 1, m, new), b = new;
        (fast ? add_faster : add_anywhere)(a, b, m, to);
    }
}

static void doubles(const double *before, const double *after, int64_t n, Squares *to) {
    for (int64_t i = 0; i < n; i++) {
        double d = after[i] - before[i];
        to->change += d * d, to->value += before[i] * before[i];
    }
}

/* moved(before, after, rows=) -> sums of squares: see `Moved`. */
EXPORT void *nnx_inspector_moved(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *before = frame->in.at[0], *after = frame->in.at[1];
    float *out = frame->out.at[0]->data;
    int batch = whole_number(frame, 0);
    int64_t rows = product(before->dims, batch), n = product(before->dims + batch, before->rank - batch);
    for (int64_t row = 0; row < rows; row++) {
        Squares all = {0, 0};
        if (before->dtype == F64)
            doubles((const double *)before->data + row * n, (const double *)after->data + row * n, n, &all);
        else singles(before, after, row * n, n, &all);
        out[2 * row] = (float)(all.change / UNIT / UNIT), out[2 * row + 1] = (float)all.value;
    }
    return NULL;
}
