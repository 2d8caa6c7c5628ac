/* Samples of units and of parameters, as `samples/sample_units.py` and `sample_parameters.py` in jax.
 *
 * Everything is added up in doubles, so that nothing overflows and no unit of measure is needed.
 */

#include "floats.h"

enum { UNITS = 64, POSITIONS = 64, HEAD = 8, PARTS = 9, LENGTH = HEAD + PARTS * UNITS, DEEP = 32 };
enum { STATE_HEAD = 7, SAMPLE = 256, HIGH = 4, WIDE = 16 };

static const float TANH_FLAT = 2.65f, SIGMOID_FLAT = 4.6f, NEAR = 0.01f;

/* What is added up of the values in the sample, unit by unit. */
typedef struct {
    int32_t low[UNITS], high[UNITS]; /* folded */
    int32_t flat[UNITS], flatter[UNITS], ends[UNITS], top[UNITS];
    double mean[UNITS], spread[UNITS], square[UNITS];
    double off[POSITIONS][UNITS]; /* mean difference from the first example at each position */
    uint32_t rows[DEEP][UNITS];   /* what was read last, as patterns */
    float away[DEEP][UNITS];      /* the last few rows of values, centred and scaled */
    float products[UNITS][UNITS]; /* sums of their products, from the diagonal on */
} Sums;

/* Add the products of a few rows. The sums of one tile stay in registers for all of them. */
EVERYWHERE void add_products(const float (*rows)[UNITS], int64_t units, float (*to)[UNITS]) {
    for (int64_t i = 0; i < units; i += HIGH)
        for (int64_t j = i / WIDE * WIDE; j < units; j += WIDE) {
            float tile[HIGH][WIDE] = {{0}};
            for (int row = 0; row < DEEP; row++)
                for (int a = 0; a < HIGH; a++)
                    for (int b = 0; b < WIDE; b++) tile[a][b] += rows[row][i + a] * rows[row][j + b];
            for (int a = 0; a < HIGH; a++)
                for (int b = 0; b < WIDE; b++) to[i + a][j + b] += tile[a][b];
        }
}

/* Where the values in the sample lie: every step along each axis, from the first. */
typedef struct {
    Load *load;
    const void *x;
    int64_t start, axes;
    const int64_t *dims, *steps;
    int64_t examples, positions, units;
} Sampled;

static int64_t few(int64_t length, int64_t step) { return (length + step - 1) / step; }

/* The values of all units at one position, for some examples from one on. The values are written one
 * by one: a processor that read the first of them at once, as a vector, would wait for the last. */
static void read_rows(const Sampled *at, int64_t position, int64_t example, int64_t n,
                      uint32_t (*to)[UNITS]) {
    int64_t from = 0, stride = at->dims[at->axes - 1];
    for (int64_t axis = at->axes - 2; axis > 0; axis--) {
        int64_t n = few(at->dims[axis], at->steps[axis]);
        from += position % n * at->steps[axis] * stride;
        position /= n, stride *= at->dims[axis];
    }
    stride *= at->steps[0], from += at->start + example * stride;
    for (int64_t row = 0; row < n && row < DEEP; row++, from += stride)
        at->load(at->x, from, at->steps[at->axes - 1], (int)at->units, to[row]);
}

static float size_of(float x) { return float_of(bits_of(x) & MAGNITUDE); }

/* Extremes, counts, the mean, and how far each position's mean lies from its first example:
 * differences from that are exact where a unit is constant. Returns whether all values are finite. */
EVERYWHERE int counts_and_means(const Sampled *at, Sums *s) {
    const int64_t units = at->units;
    uint32_t largest = 0;
    float first[UNITS];
    for (int i = 0; i < UNITS; i++) s->low[i] = INT32_MAX, s->high[i] = INT32_MIN;
    for (int64_t p = 0; p < at->positions; p++) {
        double *off = s->off[p];
        for (int64_t e = 0; e < at->examples; e++) {
            const uint32_t *row = s->rows[e % DEEP];
            if (e % DEEP == 0) read_rows(at, p, e, at->examples - e, s->rows);
            if (e == 0)
                for (int64_t i = 0; i < units; i++) first[i] = float_of(row[i]);
            for (int64_t i = 0; i < units; i++) {
                float x = float_of(row[i]), size = size_of(x), beyond = size_of(size - 1);
                uint32_t bits = bits_of(size);
                largest = bits > largest ? bits : largest;
                int32_t key = folded((int32_t)row[i]);
                s->low[i] = __builtin_elementwise_min(s->low[i], key);
                s->high[i] = __builtin_elementwise_max(s->high[i], key);
                s->flat[i] += size > TANH_FLAT, s->flatter[i] += size > SIGMOID_FLAT;
                s->ends[i] += (size <= NEAR) | (beyond <= NEAR), s->top[i] += beyond <= NEAR;
            }
            for (int64_t i = 0; i < units; i++) off[i] += (double)float_of(row[i]) - first[i];
        }
        for (int64_t i = 0; i < units; i++) {
            off[i] /= (double)at->examples;
            s->mean[i] += ((double)first[i] + off[i]) / (double)at->positions;
        }
    }
    return largest < INFINITE;
}

/* Squares about the mean and about each position's own, and products about the mean. */
EVERYWHERE void squares(const Sampled *at, double unit, Sums *s) {
    const int64_t units = at->units;
    float first[UNITS];
    double factor = 1 / unit;
    int deep = 0;
    for (int64_t p = 0; p < at->positions; p++) {
        const double *off = s->off[p];
        for (int64_t e = 0; e < at->examples; e++) {
            const uint32_t *row = s->rows[e % DEEP];
            float *away = s->away[deep];
            if (e % DEEP == 0) read_rows(at, p, e, at->examples - e, s->rows);
            if (e == 0)
                for (int64_t i = 0; i < units; i++) first[i] = float_of(row[i]);
            for (int64_t i = 0; i < units; i++) {
                double x = float_of(row[i]), here = x - first[i] - off[i], all = x - s->mean[i];
                s->spread[i] += here * here, s->square[i] += all * all;
                away[i] = (float)(all * factor);
            }
            if (++deep == DEEP) add_products(s->away, units, s->products), deep = 0;
        }
    }
    for (int i = deep; i < DEEP && deep; i++)
        for (int j = 0; j < UNITS; j++) s->away[i][j] = 0;
    if (deep) add_products(s->away, units, s->products);
}

/* The square root, by Newton's method: the library links no C library, which has it. Halving the
 * exponent in the bits gives a first value within 6 %, and each step doubles the number of digits. */
static double root(double x) {
    if (!(x > 0)) return 0;
    double y = double_of((bits64_of(x) >> 1) + (1023ull << 51)); /* half of its exponent */
    for (int i = 0; i < 6; i++) y = 0.5 * (y + x / y);
    return y;
}

EVERYWHERE void sample_units(const Sampled *at, float limit, Sums *s, float *out) {
    const float nan = float_of(0x7FC00000u);
    int64_t rows = at->examples * at->positions, k = at->units;
    for (size_t i = 0; i < sizeof *s / 4; i++) ((uint32_t *)s)[i] = 0;
    for (int i = HEAD; i < LENGTH; i++) out[i] = nan;
    float low[UNITS], high[UNITS];
    int measured = counts_and_means(at, s);
    double rank = nan, largest = 0;
    for (int64_t i = 0; i < k; i++) {
        low[i] = float_of((uint32_t)folded(s->low[i]));
        high[i] = float_of((uint32_t)folded(s->high[i]));
        largest = size_of(low[i]) > largest ? size_of(low[i]) : largest;
        largest = size_of(high[i]) > largest ? size_of(high[i]) : largest;
    }
    if (measured) {
        squares(at, largest > 0 ? largest : 1, s);
        double trace = 0, total = 0;
        for (int64_t i = 0; i < k; i++) {
            trace += s->products[i][i];
            total += (double)s->products[i][i] * s->products[i][i];
            for (int64_t j = i + 1; j < k; j++)
                total += 2 * (double)s->products[i][j] * s->products[i][j];
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
            low[i], high[i], (float)s->mean[i], (float)root(s->square[i] / n),
            (float)root(s->spread[i] / n), (float)(s->flat[i] / n), (float)(s->flatter[i] / n),
            (float)(s->ends[i] / n), (float)(s->top[i] / n),
        };
        for (int part = 0; part < PARTS; part++) out[HEAD + part * UNITS + i] = parts[part];
    }
}

static void sample_anywhere(const Sampled *at, float limit, Sums *s, float *out) {
    sample_units(at, limit, s, out);
}
FASTER static void sample_faster(const Sampled *at, float limit, Sums *s, float *out) {
    sample_units(at, limit, s, out);
}

/* sample_units(x, limit=, rows=, steps=) -> vector, and memory to work in; rows are leading axes. */
EXPORT void *nnx_inspector_sample_units(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    int64_t batch = whole_number(frame, 1), axes = x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = whole_numbers(frame, 2);
    float limit = *(const float *)((const Scalar *)frame->how.at[0])->value;
    Sampled at = {LOADS[x->dtype], x->data, 0, axes, dims, steps, few(dims[0], steps[0]), 1,
                 few(dims[axes - 1], steps[axes - 1])};
    for (int64_t axis = 1; axis < axes - 1; axis++) at.positions *= few(dims[axis], steps[axis]);
    void (*measure)(const Sampled *, float, Sums *, float *) = is_fast() ? sample_faster : sample_anywhere;
    for (int64_t row = 0; row < product(x->dims, batch); row++) {
        at.start = row * product(dims, axes);
        measure(&at, limit, frame->out.at[1]->data, (float *)frame->out.at[0]->data + row * LENGTH);
    }
    return NULL;
}

/* What is counted of all elements of a parameter: the sum of their patterns, and how many are NaN
 * and infinite. Counted in blocks, so that a lane of a vector counts in as few bits as it has. */
typedef struct {
    uint32_t sum;
    int64_t nan, infinite;
} Counted;

#define COUNT_IN(NAME, TYPE, COUNT, INF)                                                     \
    EVERYWHERE void NAME(const TYPE *x, int64_t n, Counted *to) {                            \
        for (int64_t done = 0; done < n; done += BLOCK) {                                    \
            int m = n - done < BLOCK ? (int)(n - done) : BLOCK;                              \
            uint32_t sum = 0;                                                                \
            COUNT nan = 0, infinite = 0;                                                     \
            for (int i = 0; i < m; i++) {                                                    \
                TYPE bits = x[done + i];                                                     \
                COUNT size = (COUNT)(bits & ((TYPE)~(TYPE)0 >> 1));                          \
                sum += bits, nan += size > (COUNT)INF, infinite += size == (COUNT)INF;       \
            }                                                                                \
            to->sum += sum, to->nan += nan, to->infinite += infinite;                        \
        }                                                                                    \
    }
COUNT_IN(count_words, uint32_t, int32_t, INFINITE)
COUNT_IN(count_f16, uint16_t, int16_t, 0x7C00)
COUNT_IN(count_bf16, uint16_t, int16_t, 0x7F80)

EVERYWHERE void count_all(const Buffer *x, int64_t row, int64_t n, Counted *to) {
    const uint16_t *halves = (const uint16_t *)x->data + row * n;
    if (x->dtype == F32) count_words((const uint32_t *)x->data + row * n, n, to);
    else if (x->dtype == F16) count_f16(halves, n, to);
    else count_bf16(halves, n, to);
}
static void count_anywhere(const Buffer *x, int64_t row, int64_t n, Counted *to) {
    count_all(x, row, n, to);
}
FASTER static void count_faster(const Buffer *x, int64_t row, int64_t n, Counted *to) {
    count_all(x, row, n, to);
}

/* sample_parameter(x, rows=, steps=) -> vector: see `sample_parameter`. */
EXPORT void *nnx_inspector_sample_parameter(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    int64_t batch = whole_number(frame, 0), axes = x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = whole_numbers(frame, 1);
    int64_t n = product(dims, axes), last = few(dims[axes - 1], steps[axes - 1]), lines = 1;
    for (int64_t axis = 0; axis < axes - 1; axis++) lines *= few(dims[axis], steps[axis]);
    for (int64_t row = 0; row < product(x->dims, batch); row++) {
        float *out = (float *)frame->out.at[0]->data + row * (STATE_HEAD + SAMPLE);
        uint32_t bits[SAMPLE];
        Counted all = {0, 0, 0};
        (is_fast() ? count_faster : count_anywhere)(x, row, n, &all);
        const float head[STATE_HEAD] = {
            (float)(all.sum & 0xFFFF), (float)(all.sum >> 16), (float)(lines * last),
            float_of(0x7FC00000u), float_of(0x7FC00000u), (float)all.nan, (float)all.infinite,
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
