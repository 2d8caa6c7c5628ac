/* The gauge of an array, and what is sent of a parameter: what `measure_gauges.py` describes.
 *
 * Everything is added up in doubles, so that nothing overflows and no unit of measure is needed.
 */

#include "floats.h"

enum { UNITS = 64, POSITIONS = 64, HEAD = 8, PARTS = 9, LENGTH = HEAD + PARTS * UNITS, DEEP = 4 };
enum { STATE_HEAD = 5, SAMPLE = 256 };

static const float TANH_FLAT = 2.65f, SIGMOID_FLAT = 4.6f, NEAR = 0.01f;

/* What is added up of the values that are looked at, unit by unit. */
typedef struct {
    float low[UNITS], high[UNITS];
    int32_t flat[UNITS], flatter[UNITS], ends[UNITS], top[UNITS];
    double mean[UNITS], spread[UNITS], square[UNITS];
    double off[POSITIONS][UNITS]; /* mean difference from the first example at each position */
    float away[DEEP][UNITS];      /* the last few rows of values, centred and scaled */
    float products[UNITS][UNITS]; /* sums of their products */
} Sums;

/* Adds the products of a few rows: those of one alone would be read and written each time. */
EVERYWHERE void add_products(const float (*rows)[UNITS], float (*to)[UNITS]) {
    for (int i = 0; i < UNITS; i++) {
        float a = rows[0][i], b = rows[1][i], c = rows[2][i], d = rows[3][i];
        for (int j = 0; j < UNITS; j++)
            to[i][j] += (a * rows[0][j] + b * rows[1][j]) + (c * rows[2][j] + d * rows[3][j]);
    }
}
static void multiply_anywhere(const float (*rows)[UNITS], float (*to)[UNITS]) { add_products(rows, to); }
FASTER static void multiply_faster(const float (*rows)[UNITS], float (*to)[UNITS]) {
    add_products(rows, to);
}

/* Where the values that are looked at lie: every step along each axis, from the first. */
typedef struct {
    Load *load;
    const void *x;
    int64_t start, axes;
    const int64_t *dims, *steps;
    int64_t examples, positions, units;
} Looked;

static int64_t few(int64_t length, int64_t step) { return (length + step - 1) / step; }

/* The values of all units for one example at one position. */
static void read_row(const Looked *at, int64_t example, int64_t position, float *to) {
    int64_t from = 0, stride = at->dims[at->axes - 1];
    for (int64_t axis = at->axes - 2; axis > 0; axis--) {
        int64_t n = few(at->dims[axis], at->steps[axis]);
        from += position % n * at->steps[axis] * stride;
        position /= n, stride *= at->dims[axis];
    }
    from += example * at->steps[0] * stride;
    uint32_t bits[UNITS];
    at->load(at->x, at->start + from, at->steps[at->axes - 1], (int)at->units, bits);
    for (int64_t i = 0; i < at->units; i++) to[i] = float_of(bits[i]);
}

static float size_of(float x) { return float_of(bits_of(x) & MAGNITUDE); }

/* Returns whether all values are finite. */
static int extremes_and_counts(const Looked *at, Sums *s) {
    uint32_t largest = 0;
    float row[UNITS];
    for (int i = 0; i < UNITS; i++) s->low[i] = 0x1.fffffep127f, s->high[i] = -0x1.fffffep127f;
    for (int64_t e = 0; e < at->examples; e++)
        for (int64_t p = 0; p < at->positions; p++) {
            read_row(at, e, p, row);
            for (int64_t i = 0; i < at->units; i++) {
                float x = row[i], size = size_of(x), off = size_of(size - 1);
                uint32_t bits = bits_of(size);
                largest = bits > largest ? bits : largest;
                s->low[i] = x < s->low[i] ? x : s->low[i];
                s->high[i] = x > s->high[i] ? x : s->high[i];
                s->flat[i] += size > TANH_FLAT, s->flatter[i] += size > SIGMOID_FLAT;
                s->ends[i] += (size <= NEAR) | (off <= NEAR), s->top[i] += off <= NEAR;
            }
        }
    return largest < INFINITE;
}

/* The mean, and how far each position's mean lies from its first example: differences from that
 * are exact where a unit is constant. */
static void means(const Looked *at, Sums *s) {
    float row[UNITS], first[UNITS];
    for (int64_t p = 0; p < at->positions; p++) {
        read_row(at, 0, p, first);
        for (int64_t e = 1; e < at->examples; e++) {
            read_row(at, e, p, row);
            for (int64_t i = 0; i < at->units; i++) s->off[p][i] += (double)row[i] - first[i];
        }
        for (int64_t i = 0; i < at->units; i++) {
            s->off[p][i] /= (double)at->examples;
            s->mean[i] += ((double)first[i] + s->off[p][i]) / (double)at->positions;
        }
    }
}

/* Squares about the mean and about each position's own, and products about the mean. */
static void squares(const Looked *at, double unit, Sums *s) {
    void (*multiply)(const float (*)[UNITS], float (*)[UNITS]) =
        has_avx2() ? multiply_faster : multiply_anywhere;
    float row[UNITS], first[UNITS];
    int deep = 0;
    for (int64_t p = 0; p < at->positions; p++) {
        read_row(at, 0, p, first);
        for (int64_t e = 0; e < at->examples; e++) {
            read_row(at, e, p, row);
            for (int64_t i = 0; i < at->units; i++) {
                double here = (double)row[i] - first[i] - s->off[p][i], all = row[i] - s->mean[i];
                s->spread[i] += here * here, s->square[i] += all * all;
                s->away[deep][i] = (float)(all / unit);
            }
            if (++deep == DEEP) multiply(s->away, s->products), deep = 0;
        }
    }
    for (int i = deep; i < DEEP && deep; i++)
        for (int j = 0; j < UNITS; j++) s->away[i][j] = 0;
    if (deep) multiply(s->away, s->products);
}

static double root(double x) {
    if (!(x > 0)) return 0;
    double y = double_of((bits64_of(x) >> 1) + (1023ull << 51)); /* half of its exponent */
    for (int i = 0; i < 6; i++) y = 0.5 * (y + x / y);
    return y;
}

static void gauge(const Looked *at, float limit, Sums *s, float *out) {
    const float nan = float_of(0x7FC00000u);
    int64_t rows = at->examples * at->positions, k = at->units;
    for (size_t i = 0; i < sizeof *s / 4; i++) ((uint32_t *)s)[i] = 0;
    for (int i = HEAD; i < LENGTH; i++) out[i] = nan;
    int measured = extremes_and_counts(at, s);
    double rank = nan, largest = 0;
    for (int64_t i = 0; i < k; i++) {
        largest = size_of(s->low[i]) > largest ? size_of(s->low[i]) : largest;
        largest = size_of(s->high[i]) > largest ? size_of(s->high[i]) : largest;
    }
    if (measured) {
        means(at, s);
        squares(at, largest > 0 ? largest : 1, s);
        double trace = 0, total = 0;
        for (int64_t i = 0; i < k; i++) {
            trace += s->products[i][i];
            for (int64_t j = 0; j < k; j++) total += (double)s->products[i][j] * s->products[i][j];
        }
        if (total > 0 && rows > 1 && k > 1) rank = trace * trace / total;
    }
    const float head[HEAD] = {
        (float)measured, (float)at->dims[0], (float)at->dims[at->axes - 1], (float)k,
        (float)rank, (float)at->positions, limit, 0,
    };
    for (int i = 0; i < HEAD; i++) out[i] = head[i];
    for (int64_t i = 0; i < k; i++) {
        double n = (double)rows;
        const float parts[PARTS] = {
            s->low[i], s->high[i], (float)s->mean[i], (float)root(s->square[i] / n),
            (float)root(s->spread[i] / n), (float)(s->flat[i] / n), (float)(s->flatter[i] / n),
            (float)(s->ends[i] / n), (float)(s->top[i] / n),
        };
        for (int part = 0; part < PARTS; part++) out[HEAD + part * UNITS + i] = parts[part];
    }
}

/* gauge(x, limit=, rows=, steps=) -> gauge, and memory to work in; rows are leading axes. */
EXPORT void *nnx_inspector_gauge(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    int64_t batch = whole_number(frame, 1), axes = x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = whole_numbers(frame, 2);
    float limit = *(const float *)((const Scalar *)frame->how.at[0])->value;
    Looked at = {LOADS[x->dtype], x->data, 0, axes, dims, steps, few(dims[0], steps[0]), 1,
                 few(dims[axes - 1], steps[axes - 1])};
    for (int64_t axis = 1; axis < axes - 1; axis++) at.positions *= few(dims[axis], steps[axis]);
    for (int64_t row = 0; row < product(x->dims, batch); row++) {
        at.start = row * product(dims, axes);
        gauge(&at, limit, frame->out.at[1]->data, (float *)frame->out.at[0]->data + row * LENGTH);
    }
    return NULL;
}

/* sampled(x, rows=, steps=) -> state: see `sampled`. */
EXPORT void *nnx_inspector_sampled(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    int64_t batch = whole_number(frame, 0), axes = x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = whole_numbers(frame, 1);
    int64_t n = product(dims, axes), last = few(dims[axes - 1], steps[axes - 1]), lines = 1;
    for (int64_t axis = 0; axis < axes - 1; axis++) lines *= few(dims[axis], steps[axis]);
    for (int64_t row = 0; row < product(x->dims, batch); row++) {
        float *out = (float *)frame->out.at[0]->data + row * (STATE_HEAD + SAMPLE);
        uint32_t sum = 0, bits[SAMPLE];
        if (x->dtype == F32)
            for (int64_t i = 0; i < n; i++) sum += ((const uint32_t *)x->data)[row * n + i];
        else
            for (int64_t i = 0; i < n; i++) sum += ((const uint16_t *)x->data)[row * n + i];
        const float head[STATE_HEAD] = {
            (float)(sum & 0xFFFF), (float)(sum >> 16), (float)(lines * last),
            float_of(0x7FC00000u), float_of(0x7FC00000u),
        };
        for (int i = 0; i < STATE_HEAD; i++) out[i] = head[i];
        for (int i = 0; i < SAMPLE; i++) out[STATE_HEAD + i] = 0;
        for (int64_t line = 0; line < lines; line++) {
            int64_t from = 0, stride = dims[axes - 1], left = line;
            for (int64_t axis = axes - 2; axis >= 0; axis--) {
                int64_t of = few(dims[axis], steps[axis]);
                from += left % of * steps[axis] * stride, left /= of, stride *= dims[axis];
            }
            LOADS[x->dtype](x->data, row * n + from, steps[axes - 1], (int)last, bits);
            for (int64_t i = 0; i < last; i++) out[STATE_HEAD + line * last + i] = float_of(bits[i]);
        }
    }
    return NULL;
}

/* graded(x, state, rows=) -> state, with the norm and the part of the values that is not 0. */
EXPORT void *nnx_inspector_graded(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    int64_t batch = whole_number(frame, 0), n = product(x->dims + batch, x->rank - batch);
    for (int64_t row = 0; row < product(x->dims, batch); row++) {
        const float *state = (const float *)frame->in.at[1]->data + row * (STATE_HEAD + SAMPLE);
        float *out = (float *)frame->out.at[0]->data + row * (STATE_HEAD + SAMPLE);
        uint32_t block[BLOCK];
        double square = 0;
        int64_t some = 0;
        for (int64_t done = 0; done < n; done += BLOCK) {
#pragma clang fp reassociate(on)
            int m = n - done < BLOCK ? (int)(n - done) : BLOCK;
            LOADS[x->dtype](x->data, row * n + done, 1, m, block);
            double sum = 0;
            int32_t count = 0;
            for (int i = 0; i < m; i++) {
                double value = float_of(block[i]);
                sum += value * value, count += (block[i] & MAGNITUDE) != 0;
            }
            square += sum, some += count;
        }
        int finite = (bits64_of(square) & ~SIGN64) < INFINITE64;
        for (int i = 0; i < STATE_HEAD + SAMPLE; i++) out[i] = state[i];
        out[3] = (float)(finite ? root(square) : square), out[4] = (float)some / (float)n;
    }
    return NULL;
}
