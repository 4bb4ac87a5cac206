// Attention, and LayerNorm with uint8 output, for CPUs with AVX-512. Plain C functions without torch headers, so that the file compiles
// in a second.
//
// A task is one head of one image, or a part of its queries. Keys and values are packed once per task. Then scores, softmax and the
// weighted sum of values are computed for ROWS queries at a time, within the cache.

#include <immintrin.h>

#include <cfloat>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int ROWS = 6;     // queries at a time: 6 x 4 sums, 4 operands and a broadcast fill the 32 registers
constexpr int COLUMNS = 4;  // registers of 16 floats

inline __m512 exponential(__m512 x) {
    // 2^(whole + part) with a polynomial in `part`: relative error 2e-7. Inputs are clamped at -87. The order of the operands of max
    // matters: NaN is kept.
    const __m512 power = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x), _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(power, whole);
    __m512 sum = _mm512_set1_ps(1.5403530e-4f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.3333558e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

inline void store_uint8(uint8_t* out, __m512 values) {
    const __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(values), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(whole));
}

// A number format: how many values are in the 32 bits that one multiplication takes from a row, how they are multiplied, and how
// results are rounded.
struct Float32 {
    using number = float;
    static constexpr int PACK = 1;
    static __m512 multiply(__m512 sum, uint32_t left, __m512i right) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(left))), _mm512_castsi512_ps(right), sum);
    }
    static __m512i load(const number* from, int) { return _mm512_loadu_si512(from); }
    static void store(number* out, __m512 values) { _mm512_storeu_ps(out, values); }
};

#ifdef __AVX512BF16__
struct BFloat16 {
    using number = uint16_t;
    static constexpr int PACK = 2;
    static __m512 multiply(__m512 sum, uint32_t left, __m512i right) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left))),
                                reinterpret_cast<__m512bh>(right));
    }
    static __m512i load(const number* from, int index) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return _mm512_slli_epi32(wide, 16 * index);
    }
    static void store(number* out, __m512 values) {
        const __m256bh rounded = _mm512_cvtneps_pbh(values);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<const __m256i&>(rounded));
    }
};
#endif

// sums[r][c] = left rows [ROWS][steps], read 32 bits at a time, times right [steps][width]: C registers of columns.
template <class Format, int C>
inline void product(const uint32_t* const* left, const uint32_t* right, int64_t steps, int64_t width, __m512 (&sums)[ROWS][COLUMNS]) {
    __m512 total[ROWS][C];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c) total[r][c] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step) {
        __m512i operand[C];
        for (int c = 0; c < C; ++c) operand[c] = _mm512_loadu_si512(right + step * width + 16 * c);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < C; ++c) total[r][c] = Format::multiply(total[r][c], left[r][step], operand[c]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = total[r][c];
}

template <class Format>
inline int products(const uint32_t* const* left, const uint32_t* right, int64_t steps, int64_t width, int64_t column,
                    __m512 (&sums)[ROWS][COLUMNS]) {
    const int64_t rest = (width - column) / 16;
    right += column;
    if (rest >= 4) return product<Format, 4>(left, right, steps, width, sums), 4;
    if (rest == 3) return product<Format, 3>(left, right, steps, width, sums), 3;
    if (rest == 2) return product<Format, 2>(left, right, steps, width, sums), 2;
    return product<Format, 1>(left, right, steps, width, sums), 1;
}

struct Shape {
    int64_t batch_size, heads, queries, keys, head_dim;  // head_dim is a multiple of 16
    int64_t query_row, key_row;                          // strides between tokens; heads are adjacent
    int64_t query_image, key_image;                      // strides between images
    float scale;                                         // of scores
    float factor, offset;                                // quantized output: round(output * factor + offset)
    int32_t quantized;                                   // whether the output is uint8
};

template <class Format>
void task(const Shape& s, const typename Format::number* query, const typename Format::number* key, const typename Format::number* value,
          typename Format::number* out, uint8_t* quantized, int64_t first, int64_t last, char* buffer) {
    using number = typename Format::number;
    const int64_t padded = (s.keys + 15) / 16 * 16, halves = padded / Format::PACK, depth = s.head_dim / Format::PACK;
    uint32_t* keys = reinterpret_cast<uint32_t*>(buffer);             // [depth][padded]
    uint32_t* values = keys + depth * padded;                       // [halves][size]
    float* scores = reinterpret_cast<float*>(values + halves * s.head_dim);  // [ROWS][padded]
    number* weights = reinterpret_cast<number*>(scores + ROWS * padded);  // [ROWS][padded]
    for (int64_t token = 0; token < padded; token += 16) {
        for (int64_t k = token; k < token + 16; ++k) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(key + k * s.key_row);
            for (int64_t d = 0; d < depth; ++d) keys[d * padded + k] = k < s.keys ? from[d] : 0;
        }
    }
    for (int64_t half = 0; half < halves; ++half)
        for (int64_t d = 0; d < s.head_dim; d += 16) {
            __m512i joined = _mm512_setzero_si512();
            for (int p = 0; p < Format::PACK; ++p) {
                const int64_t token = half * Format::PACK + p;
                if (token < s.keys) joined = _mm512_or_si512(joined, Format::load(value + token * s.key_row + d, p));
            }
            _mm512_storeu_si512(values + half * s.head_dim + d, joined);
        }
    const __mmask16 inside = static_cast<__mmask16>(0xFFFF >> (padded - s.keys));
    const __m512 lowest = _mm512_set1_ps(-FLT_MAX), scale = _mm512_set1_ps(s.scale);
    for (int64_t row = first; row < last; row += ROWS) {
        const uint32_t* left[ROWS];
        for (int r = 0; r < ROWS; ++r)  // rows after the last query repeat it; their results are not stored
            left[r] = reinterpret_cast<const uint32_t*>(query + (row + r < last ? row + r : last - 1) * s.query_row);
        __m512 sums[ROWS][COLUMNS], largest[ROWS], total[ROWS];
        for (int r = 0; r < ROWS; ++r) largest[r] = lowest, total[r] = _mm512_setzero_ps();
        for (int64_t column = 0; column < padded;) {
            const int computed = products<Format>(left, keys, depth, padded, column, sums);
            for (int c = 0; c < computed; ++c, column += 16) {
                const bool end = column + 16 == padded;
                for (int r = 0; r < ROWS; ++r) {
                    __m512 score = _mm512_mul_ps(sums[r][c], scale);
                    if (end) score = _mm512_mask_mov_ps(lowest, inside, score);
                    largest[r] = _mm512_max_ps(largest[r], score);
                    _mm512_storeu_ps(scores + r * padded + column, score);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m512 maximum = _mm512_set1_ps(_mm512_reduce_max_ps(largest[r]));
            for (int64_t column = 0; column < padded; column += 16) {
                __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + r * padded + column), maximum));
                if (column + 16 == padded) weight = _mm512_maskz_mov_ps(inside, weight);
                total[r] = _mm512_add_ps(total[r], weight);
                Format::store(weights + r * padded + column, weight);
            }
        }
        for (int r = 0; r < ROWS; ++r) left[r] = reinterpret_cast<const uint32_t*>(weights + r * padded);
        for (int64_t column = 0; column < s.head_dim;) {
            const int computed = products<Format>(left, values, halves, s.head_dim, column, sums);
            for (int r = 0; r < ROWS && row + r < last; ++r) {
                const __m512 normalizer = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total[r]));
                const int64_t offset = (row + r) * s.heads * s.head_dim + column;
                for (int c = 0; c < computed; ++c) {
                    const __m512 result = _mm512_mul_ps(sums[r][c], normalizer);
                    if (s.quantized)
                        store_uint8(quantized + offset + 16 * c,
                                    _mm512_fmadd_ps(result, _mm512_set1_ps(s.factor), _mm512_set1_ps(s.offset)));
                    else
                        Format::store(out + offset + 16 * c, result);
                }
            }
            column += 16 * computed;
        }
    }
}

template <class Format>
int attend(const Shape& s, const void* query, const void* key, const void* value, void* out, int threads) {
    using number = typename Format::number;
    const int64_t padded = (s.keys + 15) / 16 * 16;
    const size_t bytes = 4 * (2 * (s.head_dim / Format::PACK) * padded + 2 * ROWS * padded) + 256;
    const int64_t pairs = s.batch_size * s.heads;
    // If the heads do not divide evenly among the threads, queries are split instead; keys and values are then packed once per share.
    const int64_t shares = pairs % threads == 0 || pairs >= 8 * threads || s.queries < 4 * ROWS ? 1 : threads;
    const int64_t part = ((s.queries + shares - 1) / shares + ROWS - 1) / ROWS * ROWS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        char* buffer = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (buffer == nullptr) failed = 1;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < pairs * shares; ++index) {
            if (buffer == nullptr) continue;
            const int64_t pair = index / shares, first = index % shares * part;
            const int64_t last = first + part < s.queries ? first + part : s.queries;
            const int64_t image = pair / s.heads, head = pair % s.heads * s.head_dim;
            const int64_t offset = image * s.queries * s.heads * s.head_dim + head;
            if (first >= last) continue;
            task<Format>(s, static_cast<const number*>(query) + image * s.query_image + head,
                       static_cast<const number*>(key) + image * s.key_image + head,
                       static_cast<const number*>(value) + image * s.key_image + head, static_cast<number*>(out) + offset,
                       static_cast<uint8_t*>(out) + offset, first, last, buffer);
        }
        std::free(buffer);
    }
    return failed;
}

}  // namespace

extern "C" {

int vitrail_attend_float32(const Shape* shape, const void* query, const void* key, const void* value, void* out, int threads) {
    return attend<Float32>(*shape, query, key, value, out, threads);
}

#ifdef __AVX512BF16__
int vitrail_attend_bfloat16(const Shape* shape, const void* query, const void* key, const void* value, void* out, int threads) {
    return attend<BFloat16>(*shape, query, key, value, out, threads);
}
#endif

// Normalizes rows [rows][width] to mean 0 and standard deviation 1, then stores round(row * factor + offset) as uint8; width is a
// multiple of 16.
void vitrail_norm_to_int8(const float* x, uint8_t* out, int64_t rows, int64_t width, int64_t stride, float eps, float factor,
                          float offset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * stride;
        __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += 16) sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + d));
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
        for (int64_t d = 0; d < width; d += 16) {
            const __m512 centered = _mm512_sub_ps(_mm512_loadu_ps(from + d), mean);
            squares = _mm512_fmadd_ps(centered, centered, squares);
        }
        const float deviation = __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + eps);
        const __m512 multiplier = _mm512_set1_ps(factor / deviation), shift = _mm512_set1_ps(offset);
        for (int64_t d = 0; d < width; d += 16)
            store_uint8(out + row * width + d, _mm512_fmadd_ps(_mm512_sub_ps(_mm512_loadu_ps(from + d), mean), multiplier, shift));
    }
}
}
