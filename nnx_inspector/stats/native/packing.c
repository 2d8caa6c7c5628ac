/* Summaries as vectors of floats, and back, and many arrays as one: what `packing.py` in stats and
 * `packed.py` in records describe. */

#include "xla.h"

enum { BINS = 4096 };

static double read_real(const void *from, int64_t i, int wide) {
    return wide ? ((const double *)from)[i] : ((const float *)from)[i];
}

static void write_real(void *to, int64_t i, int wide, double x) {
    if (wide) ((double *)to)[i] = x;
    else ((float *)to)[i] = (float)x;
}

/* pack(bins, points, sums) -> vector: see `pack` in packing.py. */
EXPORT void *nnx_inspector_pack(Frame *frame) {
    if (is_asked(frame)) return NULL;
    Buffer **in = frame->in.at, *out = frame->out.at[0];
    int wide = out->dtype == F64, words = wide ? 2 : 1;
    int64_t rows = product(out->dims, out->rank - 1), total = BINS + 6 * words;
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t *bins = (const uint32_t *)in[0]->data + row * BINS;
        const uint32_t *points = (const uint32_t *)in[1]->data + row * 3 * words;
        const uint32_t *sums = (const uint32_t *)in[2]->data + row * 3 * words;
        int64_t at = row * (1 + 2 * total);
        uint32_t any = 0;
        for (int64_t i = 0; i < total; i++) {
            uint32_t word = i < BINS ? bins[i]
                : i < BINS + 3 * words ? points[i - BINS] : sums[i - BINS - 3 * words];
            if (i < BINS) any |= word;
            write_real(out->data, at + 1 + 2 * i, wide, word >> 16);
            write_real(out->data, at + 2 + 2 * i, wide, word & 0xFFFF);
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
    int64_t rows = product(in->dims, in->rank - 1), total = BINS + 6 * words;
    for (int64_t row = 0; row < rows; row++) {
        uint32_t *bins = (uint32_t *)out[0]->data + row * BINS;
        uint32_t *points = (uint32_t *)out[1]->data + row * 3 * words;
        uint32_t *sums = (uint32_t *)out[2]->data + row * 3 * words;
        int64_t at = row * (1 + 2 * total);
        int several = read_real(in->data, at, wide) > 1;
        for (int64_t i = 0; i < total; i++) {
            uint32_t upper = (uint32_t)read_real(in->data, at + 1 + 2 * i, wide);
            uint32_t lower = (uint32_t)read_real(in->data, at + 2 + 2 * i, wide);
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
