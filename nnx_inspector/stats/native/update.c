/* How far a parameter is moved, and how much of what is added to it is lost: what `Moved` in
 * program/editing/functions.py describes.
 *
 * XLA would make the new value once more within the loop that adds up, the optimizer's arithmetic
 * with it, and compile that loop for each parameter.
 */

#include "floats.h"

static const double UNIT = 0x1p-30;
enum { PART = BLOCK / 4 }; /* of three arrays: a larger frame needs a function of C's own library */

typedef struct { double change, value; int64_t meant, lost; } Sums;

EVERYWHERE void add_block(const uint32_t *before, const uint32_t *after, const uint32_t *added, int n,
                          Sums *to) {
#pragma clang fp reassociate(on)
    double change = 0, value = 0;
    int meant = 0, lost = 0;
    for (int i = 0; i < n; i++) {
        double old = (double)float_of(before[i]), d = (double)float_of(after[i]) - old;
        int some = (added[i] & MAGNITUDE) != 0;
        change += d * d, value += old * old;
        meant += some, lost += some & (d == 0);
    }
    to->change += change, to->value += value, to->meant += meant, to->lost += lost;
}
static void add_anywhere(const uint32_t *before, const uint32_t *after, const uint32_t *added, int n,
                         Sums *to) {
    add_block(before, after, added, n, to);
}
FASTER static void add_faster(const uint32_t *before, const uint32_t *after, const uint32_t *added,
                              int n, Sums *to) {
    add_block(before, after, added, n, to);
}

/* Some values of an array as float32, where they lie or in a place for them. */
static const uint32_t *read_some(const Buffer *from, int64_t at, int n, uint32_t *place) {
    if (from->dtype == F32) return (const uint32_t *)from->data + at;
    LOADS[from->dtype](from->data, at, 1, n, place);
    return place;
}

static void singles(const Buffer *const *xs, int64_t at, int64_t n, Sums *to) {
    uint32_t place[3][PART];
    int fast = is_fast();
    for (int64_t end = at + n; at < end; at += PART) {
        int m = end - at < PART ? (int)(end - at) : PART;
        const uint32_t *x[3];
        for (int i = 0; i < 3; i++) x[i] = read_some(xs[i], at, m, place[i]);
        (fast ? add_faster : add_anywhere)(x[0], x[1], x[2], m, to);
    }
}

static void doubles(const Buffer *const *xs, int64_t at, int64_t n, Sums *to) {
    const double *before = xs[0]->data, *after = xs[1]->data, *added = xs[2]->data;
    for (int64_t end = at + n; at < end; at++) {
        double d = after[at] - before[at];
        int some = (bits64_of(added[at]) & ~SIGN64) != 0;
        to->change += d * d, to->value += before[at] * before[at];
        to->meant += some, to->lost += some & (d == 0);
    }
}

/* moved(before, after[, added], rows=) -> sums: see `Moved`. */
EXPORT void *nnx_inspector_update(Frame *frame) {
    if (is_asked(frame)) return NULL;
    int known = frame->in.count > 2;
    const Buffer *before = frame->in.at[0], *xs[] = {before, frame->in.at[1], frame->in.at[known ? 2 : 1]};
    float *out = frame->out.at[0]->data;
    int batch = whole_number(frame, 0);
    int64_t rows = product(before->dims, batch), n = product(before->dims + batch, before->rank - batch);
    for (int64_t row = 0; row < rows; row++, out += 4) {
        Sums all = {0, 0, 0, 0};
        (before->dtype == F64 ? doubles : singles)(xs, row * n, n, &all);
        out[0] = (float)(all.change / UNIT / UNIT), out[1] = (float)all.value;
        out[2] = known ? (float)all.meant : float_of(MAGNITUDE); /* NaN */
        out[3] = known ? (float)all.lost : float_of(MAGNITUDE);
    }
    return NULL;
}
