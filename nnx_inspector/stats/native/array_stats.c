/* The figures of an array on a CPU: what `array_stats.py` describes, as a function that XLA calls.
 *
 * XLA compiles some ten loops for each array that is summarised, which takes it longer than the
 * model itself; a call of this function takes it no time. It also reads the array once. Invariant:
 * counts, extremes and bins are those of the other programs, bit for bit.
 */

#include "floats.h"

enum { BINS = 4096, LOW_BITS = 20 };
enum { POSINF_BIN = 0xFF << 3, SIGN_BIN = BINS / 2, NAN_BIN = SIGN_BIN - 1 };
enum { ZERO_BIN = POSINF_BIN + 1, ZERO_BINS = 4, UNSEEN_BIN = POSINF_BIN + 3 };
enum { NEGINF_BIN = SIGN_BIN | POSINF_BIN, MINUS_ZERO_BIN = SIGN_BIN | ZERO_BIN };

/* ------------------------------------------------------------------ counts and sums */

typedef struct { uint64_t zeros, minus_zeros, nans, posinfs, neginfs; } Counts;

/* What is known of a row of values that float32 holds. */
typedef struct { Counts counts; int32_t low, high; double sum, squares; } Singles;

/* Add a block to a row. Loops that do one thing each are vectorised; zeros of either sign, NaN and
 * Inf are told apart in blocks that have any. */
EVERYWHERE void add_block(const uint32_t *bits, int n, double shift, Singles *to) {
#pragma clang fp reassociate(on)
    int32_t low = INT32_MAX, high = INT32_MIN, largest = 0, zeros = 0;
    for (int i = 0; i < n; i++) {
        int32_t key = folded((int32_t)bits[i]), magnitude = (int32_t)(bits[i] & MAGNITUDE);
        low = key < low ? key : low;
        high = key > high ? key : high;
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
    }
    double sum = 0, squares = 0;
    if (largest < (int32_t)INFINITE) {
        for (int i = 0; i < n; i++) {
            double d = (double)float_of(bits[i]) - shift;
            sum += d, squares += d * d;
        }
    } else {
        int32_t nans = 0, posinfs = 0, neginfs = 0;
        low = INT32_MAX, high = INT32_MIN;
        for (int i = 0; i < n; i++) {
            int finite = (bits[i] & MAGNITUDE) < INFINITE;
            int32_t key = folded((int32_t)bits[i]);
            int32_t least = finite ? key : INT32_MAX, most = finite ? key : INT32_MIN;
            low = least < low ? least : low;
            high = most > high ? most : high;
            nans += (bits[i] & MAGNITUDE) > INFINITE;
            posinfs += bits[i] == INFINITE;
            neginfs += bits[i] == (SIGN | INFINITE);
        }
        for (int i = 0; i < n; i++) {
            double d = (double)float_of(bits[i]) - shift;
            d = (bits[i] & MAGNITUDE) < INFINITE ? d : 0;
            sum += d, squares += d * d;
        }
        to->counts.nans += nans, to->counts.posinfs += posinfs, to->counts.neginfs += neginfs;
    }
    if (zeros) {
        int32_t minus = 0;
        for (int i = 0; i < n; i++) minus += bits[i] == SIGN;
        to->counts.zeros += zeros - minus, to->counts.minus_zeros += minus;
    }
    to->low = low < to->low ? low : to->low, to->high = high > to->high ? high : to->high;
    to->sum += sum, to->squares += squares;
}

/* The bin of each of a block's values. Zeros, which crowd after a ReLU, take turns at four: many
 * additions to one counter would queue up. */
EVERYWHERE void find_bins(uint32_t *bits, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = bits[i] & MAGNITUDE, bin = bits[i] >> LOW_BITS;
        bin = magnitude == 0 ? ZERO_BIN + (uint32_t)i % ZERO_BINS : bin;
        bits[i] = magnitude > INFINITE ? NAN_BIN : bin;
    }
}

typedef struct {
    void (*add)(const uint32_t *bits, int n, double shift, Singles *to);
    void (*find)(uint32_t *bits, int n);
} Loops;

static void add_anywhere(const uint32_t *bits, int n, double shift, Singles *to) {
    add_block(bits, n, shift, to);
}
static void find_anywhere(uint32_t *bits, int n) { find_bins(bits, n); }
FASTER static void add_faster(const uint32_t *bits, int n, double shift, Singles *to) {
    add_block(bits, n, shift, to);
}
FASTER static void find_faster(uint32_t *bits, int n) { find_bins(bits, n); }

static Loops loops_here(void) {
    return is_fast() ? (Loops){add_faster, find_faster} : (Loops){add_anywhere, find_anywhere};
}

/* A power of two, 2 to 4 times the largest |half|, as `scale_for` in arithmetic.py. */
static float scale_for(float a, float b) {
    int32_t x = (int32_t)(bits_of(a) & MAGNITUDE) >> 23, y = (int32_t)(bits_of(b) & MAGNITUDE) >> 23;
    int32_t largest = x > y ? x : y;
    return largest ? float_of((uint32_t)(largest + 2 > 253 ? 253 : largest + 2) << 23) : 0;
}

static double scale64_for(double a, double b) {
    int64_t x = (int64_t)(bits64_of(a) & ~SIGN64) >> 52, y = (int64_t)(bits64_of(b) & ~SIGN64) >> 52;
    int64_t largest = x > y ? x : y;
    return largest ? double_of((uint64_t)(largest + 2 > 2045 ? 2045 : largest + 2) << 52) : 0;
}

static double clipped(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* Values that float32 holds: doubles add them up about any one of them. Their mean is at most
 * sqrt(n) deviations from it, so that the variance loses at most n * 2**-53 of itself. */
static void singles(const void *x, int64_t at, int64_t n, Load *load, int plain, Loops loops,
                    Counts *counts, float *points, float *sums) {
    uint32_t block[BLOCK];
    Singles row = {{0}, INT32_MAX, INT32_MIN, 0, 0};
    double shift = 0;
    for (int64_t done = 0; done < n; done += BLOCK) {
        int m = n - done < BLOCK ? (int)(n - done) : BLOCK;
        const uint32_t *bits = (const uint32_t *)x + at + done;
        if (!plain) load(x, at + done, 1, m, block), bits = block;
        if (row.low > row.high) /* nothing finite so far */
            for (int i = 0; i < m; i++)
                if ((bits[i] & MAGNITUDE) < INFINITE) { shift = float_of(bits[i]); break; }
        loops.add(bits, m, shift, &row);
    }
    *counts = row.counts;
    for (int i = 0; i < 3; i++) points[i] = sums[i] = 0;
    if (row.low > row.high) return;
    float low = float_of((uint32_t)folded(row.low)), high = float_of((uint32_t)folded(row.high));
    double many = (double)(n - (int64_t)(counts->nans + counts->posinfs + counts->neginfs));
    double off = row.sum / many;
    float origin = (float)clipped(shift + off, low, high);
    double left = (shift - origin) + off, squares = row.squares - row.sum * off;
    float scale = scale_for(0.5f * high - 0.5f * origin, 0.5f * low - 0.5f * origin);
    points[0] = low, points[1] = high, points[2] = origin;
    if (scale == 0) return;
    sums[0] = scale;
    sums[1] = (float)(many * left / scale);
    sums[2] = (float)(((squares > 0 ? squares : 0) + many * left * left) / scale / scale);
}

/* Doubles: extremes, then the mean, then sums about it, in units of a power of two. */
static void doubles(const double *x, int64_t n, Counts *counts, double *points, double *sums) {
    int64_t low = INT64_MAX, high = INT64_MIN;
    Counts found = {0};
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = bits64_of(x[i]), magnitude = bits & ~SIGN64;
        int64_t key = folded64((int64_t)bits);
        if (magnitude < INFINITE64) low = key < low ? key : low, high = key > high ? key : high;
        found.zeros += bits == 0, found.minus_zeros += bits == SIGN64;
        found.nans += magnitude > INFINITE64;
        found.posinfs += bits == INFINITE64, found.neginfs += bits == (SIGN64 | INFINITE64);
    }
    *counts = found;
    for (int i = 0; i < 3; i++) points[i] = sums[i] = 0;
    if (low > high) return;
    double least = double_of((uint64_t)folded64(low)), most = double_of((uint64_t)folded64(high));
    double many = (double)(n - (int64_t)(found.nans + found.posinfs + found.neginfs));
    double origin = least;
    for (int again = 0; again < 2; again++) {
        double scale = scale64_for(0.5 * most - 0.5 * origin, 0.5 * least - 0.5 * origin);
        double factor = scale == 0 ? 0 : 1 / scale, total = 0, squares = 0;
        for (int64_t done = 0; done < n; done += BLOCK) {
            double sum = 0, square = 0;
            for (int64_t i = done; i < n && i < done + BLOCK; i++) {
                double d = x[i] * factor - origin * factor;
                d = (bits64_of(x[i]) & ~SIGN64) < INFINITE64 ? d : 0;
                sum += d, square += d * d;
            }
            total += sum, squares += square;
        }
        points[0] = least, points[1] = most, points[2] = origin;
        sums[0] = scale, sums[1] = total, sums[2] = squares;
        origin = clipped(origin + total / many * scale, least, most);
    }
}

/* Integers of 32 and 64 bits, as unsigned ones of the same order. */
#define INTEGERS(NAME, TYPE, FLIP, REAL, SCALE)                                              \
    static void NAME(const TYPE *x, int64_t n, Counts *counts, TYPE *points, REAL *sums) {   \
        const TYPE flip = FLIP;                                                              \
        TYPE low = (TYPE)-1, high = 0;                                                       \
        Counts found = {0};                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                    \
            TYPE key = x[i] ^ flip;                                                          \
            low = key < low ? key : low, high = key > high ? key : high;                     \
            found.zeros += x[i] == 0;                                                        \
        }                                                                                    \
        *counts = found;                                                                     \
        double total = 0, squares = 0;                                                       \
        for (int64_t done = 0; done < n; done += BLOCK) {                                    \
            double sum = 0, square = 0;                                                      \
            for (int64_t i = done; i < n && i < done + BLOCK; i++) {                         \
                double d = (double)(TYPE)((x[i] ^ flip) - low);                              \
                sum += d, square += d * d;                                                   \
            }                                                                                \
            total += sum, squares += square;                                                 \
        }                                                                                    \
        double off = total / (double)n, range = (double)(TYPE)(high - low);                  \
        TYPE step = off + 0.5 >= range ? (TYPE)(high - low) : (TYPE)(off + 0.5);             \
        double left = off - (double)step, around = squares - total * off;                    \
        double scale = SCALE((REAL)(TYPE)(high - low - step) / 2, (REAL)step / 2);           \
        points[0] = low ^ flip, points[1] = high ^ flip, points[2] = (low + step) ^ flip;    \
        sums[0] = (REAL)scale, sums[1] = sums[2] = 0;                                        \
        if (scale == 0) return;                                                              \
        sums[1] = (REAL)((double)n * left / scale);                                          \
        sums[2] = (REAL)(((around > 0 ? around : 0) + (double)n * left * left) / scale / scale); \
    }

INTEGERS(signed32, uint32_t, SIGN, float, scale_for)
INTEGERS(unsigned32, uint32_t, 0, float, scale_for)
INTEGERS(signed64, uint64_t, SIGN64, double, scale64_for)
INTEGERS(unsigned64, uint64_t, 0, double, scale64_for)

/* ------------------------------------------------------------------ the histogram */

/* Count the values at every step along each axis into bins. */
static void histogram(const void *x, int64_t at, Load *load, Loops loops, int axes,
                      const int64_t *dims, const int64_t *steps, uint32_t *bins) {
    uint32_t block[BLOCK];
    int64_t index[64], stride[64], last = axes - 1;
    stride[last] = 1;
    for (int64_t axis = last; axis > 0; axis--) stride[axis - 1] = stride[axis] * dims[axis];
    for (int64_t axis = 0; axis < axes; axis++) index[axis] = steps[axis] / 2;
    for (int i = 0; i < BINS; i++) bins[i] = 0;
    for (;;) {
        int64_t from = at, left = (dims[last] - steps[last] / 2 + steps[last] - 1) / steps[last];
        for (int64_t axis = 0; axis < axes; axis++) from += index[axis] * stride[axis];
        while (left > 0) {
            int n = left < BLOCK ? (int)left : BLOCK;
            load(x, from, steps[last], n, block);
            loops.find(block, n);
            for (int i = 0; i < n; i++) bins[block[i]]++;
            left -= n, from += n * steps[last];
        }
        int64_t axis = last - 1;
        for (; axis >= 0; axis--) {
            if ((index[axis] += steps[axis]) < dims[axis]) break;
            index[axis] = steps[axis] / 2;
        }
        if (axis < 0) break;
    }
}

static uint32_t saturated(uint64_t count) { return count > UINT32_MAX ? UINT32_MAX : (uint32_t)count; }

/* The exact counts in place of those of the sample, and the rest of the values as unseen. */
static void complete(uint32_t *bins, int64_t n, int64_t sampled, const Counts *c) {
    uint64_t others = c->zeros + c->minus_zeros + c->nans + c->posinfs + c->neginfs;
    uint64_t counted = (uint64_t)sampled - bins[NAN_BIN] - bins[POSINF_BIN] - bins[NEGINF_BIN];
    for (int i = 0; i < ZERO_BINS; i++) counted -= bins[ZERO_BIN + i], bins[ZERO_BIN + i] = 0;
    bins[ZERO_BIN] = saturated(c->zeros), bins[MINUS_ZERO_BIN] = saturated(c->minus_zeros);
    bins[NAN_BIN] = saturated(c->nans);
    bins[POSINF_BIN] = saturated(c->posinfs), bins[NEGINF_BIN] = saturated(c->neginfs);
    bins[UNSEEN_BIN] = saturated((uint64_t)n - others - counted);
}

/* array_stats(x, batch_rank=, steps=) -> bins, points, sums: see `array_stats.py`. */
EXPORT void *nnx_inspector_array_stats(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    uint32_t *bins = frame->out.at[0]->data;
    char *points = frame->out.at[1]->data, *sums = frame->out.at[2]->data;
    int batch = whole_number(frame, 0), axes = (int)x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = whole_numbers(frame, 1);
    int64_t rows = product(x->dims, batch), n = product(dims, axes), sampled = 1;
    for (int i = 0; i < axes; i++) sampled *= (dims[i] - steps[i] / 2 + steps[i] - 1) / steps[i];
    Load *load = LOADS[x->dtype];
    Loops loops = loops_here();
    int wide = x->dtype == S64 || x->dtype == U64 || x->dtype == F64;
    for (int64_t row = 0; row < rows; row++) {
        Counts counts = {0};
        int64_t at = row * n, three = 3 * row * (wide ? 8 : 4);
        void *here = points + three, *there = sums + three;
        const void *start = (const char *)x->data + at * (wide ? 8 : 4);
        switch (x->dtype) {
            case F64: doubles(start, n, &counts, here, there); break;
            case S32: signed32(start, n, &counts, here, there); break;
            case U32: unsigned32(start, n, &counts, here, there); break;
            case S64: signed64(start, n, &counts, here, there); break;
            case U64: unsigned64(start, n, &counts, here, there); break;
            default:
                singles(x->data, at, n, load, x->dtype == F32, loops, &counts, here, there);
        }
        uint32_t *own = bins + row * BINS;
        histogram(x->data, at, load, loops, axes, dims, steps, own);
        complete(own, n, sampled, &counts);
    }
    return NULL;
}
