// Attention, and norms that answer in eight bits, for processors with AVX-512. Plain C functions: no header of torch is needed, so
// that a compiler is done in a second.
//
// A task is one head of one image (or a share of its queries). Keys and values are packed once per task; then ROWS queries at a
// time take all scores, their softmax and the weighted sum of values without leaving the cache.

#include <immintrin.h>

#include <cfloat>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int ROWS = 6;     // queries at once: 6 x 4 sums, 4 operands and a broadcast fill the 32 registers
constexpr int COLUMNS = 4;  // registers of 16 numbers

inline __m512 exponential(__m512 x) {
    // 2^(whole + part), a polynomial in the part: relative error 2e-7. Below -87 the answer is nothing. The order of the operands
    // matters: what is not a number stays so.
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

inline void store_bytes(uint8_t* out, __m512 values) {
    const __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(values), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(whole));
}

// A kind of number says how many lie in the 32 bits that one multiplication takes from a row, how they are multiplied, and how
// weights and answers are rounded to it.
struct Single {
    using number = float;
    static constexpr int PACK = 1;
    static __m512 multiply(__m512 sum, uint32_t left, __m512i right) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(left))), _mm512_castsi512_ps(right), sum);
    }
    static __m512i load(const number* from, int) { return _mm512_loadu_si512(from); }
    static void store(number* out, __m512 values) { _mm512_storeu_ps(out, values); }
};

#ifdef __AVX512BF16__
struct Half {
    using number = uint16_t;
    static constexpr int PACK = 2;
    static __m512 multiply(__m512 sum, uint32_t left, __m512i right) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left))),
                                reinterpret_cast<__m512bh>(right));
    }
    static __m512i load(const number* from, int place) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return _mm512_slli_epi32(wide, 16 * place);
    }
    static void store(number* out, __m512 values) {
        const __m256bh rounded = _mm512_cvtneps_pbh(values);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<const __m256i&>(rounded));
    }
};
#endif

// sums[r][c] = left rows [ROWS][steps], read 32 bits at a time, times right [steps][width]: C registers of columns.
template <class Kind, int C>
inline void product(const uint32_t* const* left, const uint32_t* right, int64_t steps, int64_t width, __m512 (&sums)[ROWS][COLUMNS]) {
    __m512 found[ROWS][C];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c) found[r][c] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step) {
        __m512i operand[C];
        for (int c = 0; c < C; ++c) operand[c] = _mm512_loadu_si512(right + step * width + 16 * c);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < C; ++c) found[r][c] = Kind::multiply(found[r][c], left[r][step], operand[c]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = found[r][c];
}

template <class Kind>
inline int products(const uint32_t* const* left, const uint32_t* right, int64_t steps, int64_t width, int64_t column,
                    __m512 (&sums)[ROWS][COLUMNS]) {
    const int64_t rest = (width - column) / 16;
    right += column;
    if (rest >= 4) return product<Kind, 4>(left, right, steps, width, sums), 4;
    if (rest == 3) return product<Kind, 3>(left, right, steps, width, sums), 3;
    if (rest == 2) return product<Kind, 2>(left, right, steps, width, sums), 2;
    return product<Kind, 1>(left, right, steps, width, sums), 1;
}

struct Shape {
    int64_t batch, heads, queries, keys, size;      // size: numbers of a head, a multiple of 16
    int64_t query_row, key_row;                     // numbers from one token to the next; heads lie side by side
    int64_t query_image, key_image;             // numbers from one image to the next
    float scale;                                    // of scores
    float inverse, zero;                            // answers in eight bits: round(answer * inverse + zero)
    int32_t bytes;                                  // whether they are wanted
};

template <class Kind>
void task(const Shape& s, const typename Kind::number* query, const typename Kind::number* key, const typename Kind::number* value,
          typename Kind::number* out, uint8_t* coded, int64_t first, int64_t last, char* room) {
    using number = typename Kind::number;
    const int64_t padded = (s.keys + 15) / 16 * 16, halves = padded / Kind::PACK, depth = s.size / Kind::PACK;
    uint32_t* keys = reinterpret_cast<uint32_t*>(room);             // [depth][padded]
    uint32_t* values = keys + depth * padded;                       // [halves][size]
    float* scores = reinterpret_cast<float*>(values + halves * s.size);  // [ROWS][padded]
    number* weights = reinterpret_cast<number*>(scores + ROWS * padded);  // [ROWS][padded]
    for (int64_t token = 0; token < padded; token += 16) {
        for (int64_t place = token; place < token + 16; ++place) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(key + place * s.key_row);
            for (int64_t d = 0; d < depth; ++d) keys[d * padded + place] = place < s.keys ? from[d] : 0;
        }
    }
    for (int64_t half = 0; half < halves; ++half)
        for (int64_t d = 0; d < s.size; d += 16) {
            __m512i joined = _mm512_setzero_si512();
            for (int p = 0; p < Kind::PACK; ++p) {
                const int64_t token = half * Kind::PACK + p;
                if (token < s.keys) joined = _mm512_or_si512(joined, Kind::load(value + token * s.key_row + d, p));
            }
            _mm512_storeu_si512(values + half * s.size + d, joined);
        }
    const __mmask16 inside = static_cast<__mmask16>(0xFFFF >> (padded - s.keys));
    const __m512 lowest = _mm512_set1_ps(-FLT_MAX), scale = _mm512_set1_ps(s.scale);
    for (int64_t row = first; row < last; row += ROWS) {
        const uint32_t* left[ROWS];
        for (int r = 0; r < ROWS; ++r)  // behind the last query the last one again, whose answer is not kept
            left[r] = reinterpret_cast<const uint32_t*>(query + (row + r < last ? row + r : last - 1) * s.query_row);
        __m512 sums[ROWS][COLUMNS], largest[ROWS], total[ROWS];
        for (int r = 0; r < ROWS; ++r) largest[r] = lowest, total[r] = _mm512_setzero_ps();
        for (int64_t column = 0; column < padded;) {
            const int got = products<Kind>(left, keys, depth, padded, column, sums);
            for (int c = 0; c < got; ++c, column += 16) {
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
            const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest[r]));
            for (int64_t column = 0; column < padded; column += 16) {
                __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + r * padded + column), most));
                if (column + 16 == padded) weight = _mm512_maskz_mov_ps(inside, weight);
                total[r] = _mm512_add_ps(total[r], weight);
                Kind::store(weights + r * padded + column, weight);
            }
        }
        for (int r = 0; r < ROWS; ++r) left[r] = reinterpret_cast<const uint32_t*>(weights + r * padded);
        for (int64_t column = 0; column < s.size;) {
            const int got = products<Kind>(left, values, halves, s.size, column, sums);
            for (int r = 0; r < ROWS && row + r < last; ++r) {
                const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total[r]));
                const int64_t place = (row + r) * s.heads * s.size + column;
                for (int c = 0; c < got; ++c) {
                    const __m512 answer = _mm512_mul_ps(sums[r][c], share);
                    if (s.bytes)
                        store_bytes(coded + place + 16 * c,
                                    _mm512_fmadd_ps(answer, _mm512_set1_ps(s.inverse), _mm512_set1_ps(s.zero)));
                    else
                        Kind::store(out + place + 16 * c, answer);
                }
            }
            column += 16 * got;
        }
    }
}

template <class Kind>
int attend(const Shape& s, const void* query, const void* key, const void* value, void* out, int threads) {
    using number = typename Kind::number;
    const int64_t padded = (s.keys + 15) / 16 * 16;
    const size_t each = 4 * (2 * (s.size / Kind::PACK) * padded + 2 * ROWS * padded) + 256;
    const int64_t pairs = s.batch * s.heads;
    // Where heads do not divide among the threads, their queries do, at the price of packing keys and values once per share.
    const int64_t shares = pairs % threads == 0 || pairs >= 8 * threads || s.queries < 4 * ROWS ? 1 : threads;
    const int64_t part = ((s.queries + shares - 1) / shares + ROWS - 1) / ROWS * ROWS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        char* room = static_cast<char*>(std::aligned_alloc(64, (each + 63) / 64 * 64));
        if (room == nullptr) failed = 1;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < pairs * shares; ++index) {
            if (room == nullptr) continue;
            const int64_t pair = index / shares, first = index % shares * part;
            const int64_t last = first + part < s.queries ? first + part : s.queries;
            const int64_t image = pair / s.heads, head = pair % s.heads * s.size;
            const int64_t place = image * s.queries * s.heads * s.size + head;
            if (first >= last) continue;
            task<Kind>(s, static_cast<const number*>(query) + image * s.query_image + head,
                       static_cast<const number*>(key) + image * s.key_image + head,
                       static_cast<const number*>(value) + image * s.key_image + head, static_cast<number*>(out) + place,
                       static_cast<uint8_t*>(out) + place, first, last, room);
        }
        std::free(room);
    }
    return failed;
}

}  // namespace

extern "C" {

int vitrail_attend_single(const Shape* shape, const void* query, const void* key, const void* value, void* out, int threads) {
    return attend<Single>(*shape, query, key, value, out, threads);
}

#ifdef __AVX512BF16__
int vitrail_attend_half(const Shape* shape, const void* query, const void* key, const void* value, void* out, int threads) {
    return attend<Half>(*shape, query, key, value, out, threads);
}
#endif

// Rows [rows][width] to zero mean and unit deviation, then round(row * inverse + zero) in eight bits; width a multiple of 16.
void vitrail_norm_bytes(const float* x, uint8_t* out, int64_t rows, int64_t width, int64_t stride, float epsilon, float inverse,
                        float zero, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * stride;
        __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (int64_t d = 0; d < width; d += 16) sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + d));
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
        for (int64_t d = 0; d < width; d += 16) {
            const __m512 apart = _mm512_sub_ps(_mm512_loadu_ps(from + d), mean);
            squares = _mm512_fmadd_ps(apart, apart, squares);
        }
        const float deviation = __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + epsilon);
        const __m512 factor = _mm512_set1_ps(inverse / deviation), shift = _mm512_set1_ps(zero);
        for (int64_t d = 0; d < width; d += 16)
            store_bytes(out + row * width + d, _mm512_fmadd_ps(_mm512_sub_ps(_mm512_loadu_ps(from + d), mean), factor, shift));
    }
}
}
