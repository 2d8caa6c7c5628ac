/* The census of an array on a CPU: what `census.py` describes, as functions that XLA calls.
 *
 * XLA compiles some ten loops for each array that is summarised, which takes it longer than the
 * model itself; a call of these functions takes it no time. They also read the array once. XLA's
 * foreign function interface is a stable C interface; the structures below are the part of its
 * header (xla/ffi/api/c_api.h) that is used here. Invariant: counts, extremes and bins are those of
 * the other programs, bit for bit. Nothing here allocates, blocks or fails.
 */

#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------ the interface of XLA */

typedef struct { size_t size; void *extension; int32_t major, minor; } Version;
typedef struct { size_t size; void *extension; Version version; } Api;
typedef struct { size_t size; Version version; uint32_t traits; int64_t state; } Metadata;
typedef struct { size_t size; int32_t type; void *next; Metadata *metadata; } Extension;
typedef struct {
    size_t size;
    void *extension;
    int32_t dtype;
    void *data;
    int64_t rank, *dims;
} Buffer;
typedef struct { size_t size; void *extension; int64_t count; int32_t *types; Buffer **at; } Buffers;
typedef struct { int32_t dtype; int32_t *value; } Scalar;
typedef struct { int32_t dtype; size_t count; int64_t *values; } Array;
typedef struct {
    size_t size;
    void *extension;
    int64_t count;
    int32_t *types;
    void **names, **at; /* by name */
} Attributes;
typedef struct {
    size_t size;
    Extension *extension;
    const Api *api;
    void *context;
    int32_t stage;
    Buffers in, out;
    Attributes how;
} Frame;

enum { PRED = 1, S8, S16, S32, S64, U8, U16, U32, U64, F16, F32, F64, BF16 = 16 };

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
int _fltused; /* what a library of Windows has to have */
int DllMainCRTStartup(void *library, unsigned reason, void *reserved) {
    return library && (reason || reserved || 1);
}
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* What a compiler may call for a loop that fills or copies memory: no library is linked. */
__attribute__((no_builtin)) void *memset(void *to, int byte, size_t n) {
    for (char *at = to; n--;) *at++ = (char)byte;
    return to;
}
__attribute__((no_builtin)) void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    const char *next = from;
    for (char *at = to; n--;) *at++ = *next++;
    return to;
}

/* XLA asks a function for its version when the function is registered: any version of the major
 * number 0 has these structures. */
static int is_asked(Frame *frame) {
    Extension *asks = frame->extension;
    if (!asks || asks->type != 1) return 0;
    asks->metadata->version.major = 0;
    asks->metadata->version.minor = frame->api->version.minor;
    asks->metadata->traits = 0;
    asks->metadata->state = 0;
    return 1;
}

/* ------------------------------------------------------------------ patterns of floats */

enum { BINS = 4096, LOW_BITS = 20, BLOCK = 512 };
enum { POSINF_BIN = 0xFF << 3, SIGN_BIN = BINS / 2, NAN_BIN = SIGN_BIN - 1 };
enum { ZERO_BIN = POSINF_BIN + 1, UNSEEN_BIN = POSINF_BIN + 3 };
enum { NEGINF_BIN = SIGN_BIN | POSINF_BIN, MINUS_ZERO_BIN = SIGN_BIN | ZERO_BIN };

static const uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, INFINITE = 0x7F800000u;
static const uint64_t SIGN64 = 1ull << 63, INFINITE64 = 0x7FFull << 52;

static inline uint32_t bits_of(float x) { union { float x; uint32_t bits; } u = {x}; return u.bits; }
static inline float float_of(uint32_t bits) { union { uint32_t bits; float x; } u = {bits}; return u.x; }
static inline uint64_t bits64_of(double x) { union { double x; uint64_t bits; } u = {x}; return u.bits; }
static inline double double_of(uint64_t bits) { union { uint64_t bits; double x; } u = {bits}; return u.x; }

/* Signed integers of the same order as the floats, and back. */
static inline int32_t folded(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
static inline int64_t folded64(int64_t bits) { return bits ^ ((bits >> 63) & INT64_MAX); }

static uint32_t from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return sign | INFINITE | (rest & 0x3FF) << 13;
    if (rest >= 0x0400) return sign | ((rest << 13) + (112u << 23));
    return sign | bits_of((float)rest * 0x1p-24f); /* exact, and normal if it is not 0 */
}

/* The nearest float32 selects the bin of a double. One below the normal ones is the least of them,
 * because the processor may be set to make it 0. */
static uint32_t from_double(double x) {
    uint32_t sign = (uint32_t)(bits64_of(x) >> 32) & SIGN;
    double size = double_of(bits64_of(x) & ~SIGN64);
    if (bits64_of(size) == 0) return sign;
    if (bits64_of(size) > INFINITE64) return sign | MAGNITUDE;
    if (bits64_of(size) == INFINITE64) return sign | INFINITE;
    if (size < 0x1p-126) return sign | 1;
    return sign | (size > 0x1.fffffep127 ? INFINITE - 1 : bits_of((float)size));
}

/* ------------------------------------------------------------------ reading */

/* Read n values, the first at an index and the others each a step further, as float32 patterns. */
typedef void Load(const void *from, int64_t at, int64_t step, int n, uint32_t *to);

#define LOAD(NAME, TYPE, PATTERN)                                                            \
    static void NAME(const void *from, int64_t at, int64_t step, int n, uint32_t *to) {      \
        const TYPE *x = (const TYPE *)from + at;                                             \
        if (step == 1)                                                                       \
            for (int i = 0; i < n; i++) { TYPE v = x[i]; to[i] = PATTERN; }                  \
        else                                                                                 \
            for (int i = 0; i < n; i++) { TYPE v = x[i * step]; to[i] = PATTERN; }           \
    }

LOAD(load_pred, uint8_t, bits_of((float)(v != 0)))
LOAD(load_s8, int8_t, bits_of((float)v))
LOAD(load_s16, int16_t, bits_of((float)v))
LOAD(load_s32, int32_t, bits_of((float)v))
LOAD(load_s64, int64_t, bits_of((float)v))
LOAD(load_u8, uint8_t, bits_of((float)v))
LOAD(load_u16, uint16_t, bits_of((float)v))
LOAD(load_u32, uint32_t, bits_of((float)v))
LOAD(load_u64, uint64_t, bits_of((float)v))
LOAD(load_f16, uint16_t, from_half(v))
LOAD(load_f32, uint32_t, v)
LOAD(load_f64, double, from_double(v))
LOAD(load_bf16, uint16_t, (uint32_t)v << 16)

static Load *const LOADS[BF16 + 1] = {
    [PRED] = load_pred, [S8] = load_s8,   [S16] = load_s16, [S32] = load_s32, [S64] = load_s64,
    [U8] = load_u8,     [U16] = load_u16, [U32] = load_u32, [U64] = load_u64, [F16] = load_f16,
    [F32] = load_f32,   [F64] = load_f64, [BF16] = load_bf16,
};

/* ------------------------------------------------------------------ counts and sums */

typedef struct { uint64_t zeros, minus_zeros, nans, posinfs, neginfs; } Counts;

/* What is known of a row of values that float32 holds. */
typedef struct { Counts counts; int32_t low, high; double sum, squares; } Singles;

/* XLA compiles for the processor that it finds; this is compiled once for all of them. */
#if defined(__x86_64__)
#define FASTER __attribute__((target("avx2")))
static int has_avx2(void) {
    uint32_t a = 1, b, c = 0, d, low, high;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if ((c & (1u << 27)) == 0) return 0; /* the system does not keep the wide registers */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    a = 7, c = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (low & 6) == 6 && (b & (1u << 5));
}
#else
#define FASTER
static int has_avx2(void) { return 0; }
#endif

#define EVERYWHERE static inline __attribute__((always_inline))

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

/* The bin of each of a block's values. */
EVERYWHERE void find_bins(const uint32_t *bits, int n, uint32_t *bins) {
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = bits[i] & MAGNITUDE, bin = bits[i] >> LOW_BITS;
        bin = magnitude == 0 ? ZERO_BIN | (bin & SIGN_BIN) : bin;
        bins[i] = magnitude > INFINITE ? NAN_BIN : bin;
    }
}

typedef struct {
    void (*add)(const uint32_t *bits, int n, double shift, Singles *to);
    void (*find)(const uint32_t *bits, int n, uint32_t *bins);
} Loops;

static void add_anywhere(const uint32_t *bits, int n, double shift, Singles *to) {
    add_block(bits, n, shift, to);
}
static void find_anywhere(const uint32_t *bits, int n, uint32_t *bins) { find_bins(bits, n, bins); }
FASTER static void add_faster(const uint32_t *bits, int n, double shift, Singles *to) {
    add_block(bits, n, shift, to);
}
FASTER static void find_faster(const uint32_t *bits, int n, uint32_t *bins) {
    find_bins(bits, n, bins);
}

static Loops loops_here(void) {
    return has_avx2() ? (Loops){add_faster, find_faster} : (Loops){add_anywhere, find_anywhere};
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
            loops.find(block, n, block);
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
    const struct { int bin; uint64_t count; } apart[] = {
        {ZERO_BIN, c->zeros}, {MINUS_ZERO_BIN, c->minus_zeros}, {NAN_BIN, c->nans},
        {POSINF_BIN, c->posinfs}, {NEGINF_BIN, c->neginfs},
    };
    uint64_t counted = (uint64_t)sampled, exact = 0;
    for (int i = 0; i < 5; i++) {
        counted -= bins[apart[i].bin], exact += apart[i].count;
        bins[apart[i].bin] = saturated(apart[i].count);
    }
    bins[UNSEEN_BIN] = saturated((uint64_t)n - exact - counted);
}

/* census(x, batch_rank=, steps=) -> bins, points, sums: see `census` in census.py. */
EXPORT void *nnx_inspector_census(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *x = frame->in.at[0];
    uint32_t *bins = frame->out.at[0]->data;
    char *points = frame->out.at[1]->data, *sums = frame->out.at[2]->data;
    int batch = *((Scalar *)frame->how.at[0])->value, axes = (int)x->rank - batch;
    const int64_t *dims = x->dims + batch, *steps = ((Array *)frame->how.at[1])->values;
    int64_t rows = 1, n = 1, sampled = 1;
    for (int i = 0; i < batch; i++) rows *= x->dims[i];
    for (int i = 0; i < axes; i++) {
        n *= dims[i];
        sampled *= (dims[i] - steps[i] / 2 + steps[i] - 1) / steps[i];
    }
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
        if (sampled < n) complete(own, n, sampled, &counts);
    }
    return NULL;
}

/* ------------------------------------------------------------------ packing */

static double read_real(const void *from, int64_t i, int wide) {
    return wide ? ((const double *)from)[i] : ((const float *)from)[i];
}

static void write_real(void *to, int64_t i, int wide, double x) {
    if (wide) ((double *)to)[i] = x;
    else ((float *)to)[i] = (float)x;
}

static int64_t rows_of(const Buffer *x) {
    int64_t rows = 1;
    for (int64_t axis = 0; axis < x->rank - 1; axis++) rows *= x->dims[axis];
    return rows;
}

/* pack(bins, points, sums) -> vector: see `pack` in packing.py. */
EXPORT void *nnx_inspector_pack(Frame *frame) {
    if (is_asked(frame)) return NULL;
    Buffer **in = frame->in.at, *out = frame->out.at[0];
    int wide = out->dtype == F64, words = wide ? 2 : 1;
    int64_t rows = rows_of(out), middle = BINS + 6 * words;
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t *bins = (const uint32_t *)in[0]->data + row * BINS;
        const uint32_t *points = (const uint32_t *)in[1]->data + row * 3 * words;
        const uint32_t *sums = (const uint32_t *)in[2]->data + row * 3 * words;
        int64_t at = row * (1 + 2 * middle);
        uint32_t any = 0;
        for (int64_t i = 0; i < middle; i++) {
            uint32_t word = i < BINS ? bins[i]
                : i < BINS + 3 * words ? points[i - BINS] : sums[i - BINS - 3 * words];
            if (i < BINS) any |= word;
            write_real(out->data, at + 1 + i, wide, word >> 16);
            write_real(out->data, at + 1 + middle + i, wide, word & 0xFFFF);
        }
        write_real(out->data, at, wide, any != 0);
    }
    return NULL;
}

/* unpack(vector) -> bins, points, sums: see `unpack` in packing.py. */
EXPORT void *nnx_inspector_unpack(Frame *frame) {
    if (is_asked(frame)) return NULL;
    const Buffer *in = frame->in.at[0];
    Buffer **out = frame->out.at;
    int wide = in->dtype == F64, words = wide ? 2 : 1;
    int64_t rows = rows_of(in), middle = BINS + 6 * words;
    for (int64_t row = 0; row < rows; row++) {
        uint32_t *bins = (uint32_t *)out[0]->data + row * BINS;
        uint32_t *points = (uint32_t *)out[1]->data + row * 3 * words;
        uint32_t *sums = (uint32_t *)out[2]->data + row * 3 * words;
        int64_t at = row * (1 + 2 * middle);
        int several = read_real(in->data, at, wide) > 1;
        for (int64_t i = 0; i < middle; i++) {
            uint32_t upper = (uint32_t)read_real(in->data, at + 1 + i, wide);
            uint32_t lower = (uint32_t)read_real(in->data, at + 1 + middle + i, wide);
            uint32_t carried = upper + (lower >> 16);
            uint32_t word = carried > 0xFFFF ? UINT32_MAX : carried << 16 | (lower & 0xFFFF);
            uint32_t nan = !wide ? 0x7FC00000u : (i - BINS) % 2 ? 0x7FF80000u : 0;
            if (i >= BINS && several) word = nan; /* moments do not add up */
            if (i < BINS) bins[i] = word;
            else if (i < BINS + 3 * words) points[i - BINS] = word;
            else sums[i - BINS - 3 * words] = word;
        }
    }
    return NULL;
}
