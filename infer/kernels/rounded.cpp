// Products with weights rounded to 8 or 4 bits, for CPUs with AVX512-VNNI.
//
// Inputs are rounded too, by groups of 32 of a row, to integers of -127..127 times the group's scale. So the products of
// a group are of small integers, whose sum is exact, and the groups' sums add up in order: a row's result is the same to
// the last bit whatever else is in the forward.
//
//     y[m, n] = bias[n] + sum over groups g of  x_scale[m, g] * (scale[n, g] * S + centre[n, g] * X)
//     S: the sum of products of codes, X: the sum of the input's codes. 8 bits have no centres.
//
// infer/kernels/rounded.py calls it.

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

constexpr int GROUP = 32;  // inputs that share a scale
constexpr int ROWS = 6;    // rows that one pass over a tile serves: 24 of 32 registers hold their sums

// Rows rounded to 8 bits, in blocks of as many as one pass takes: of every four inputs, those of all its rows lie beside
// each other.
struct Rows {
    int K, a_pass;
    std::vector<int8_t> codes;  // blocks [K / 4, rows, 4]
    std::vector<int32_t> sums;  // of each group's codes: [M, K / 32]
    std::vector<float> scales;  // [M, K / 32]
};

template <typename T>
void round_row(const T* x, Rows& rows, int m, int M) {
    const __m512 no_sign = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
    const int begin = m / rows.a_pass * rows.a_pass, count = std::min(rows.a_pass, M - begin);
    int8_t* codes = rows.codes.data() + (size_t)begin * rows.K + 4 * (m - begin);
    const size_t row = (size_t)m * (rows.K / GROUP);
    for (int g = 0; g < rows.K / GROUP; g++) {
        const __m512 values[2] = {load(x + g * GROUP), load(x + g * GROUP + 16)};
        const __m512 largest =
            _mm512_max_ps(_mm512_and_ps(values[0], no_sign), _mm512_and_ps(values[1], no_sign));
        const float top = _mm512_reduce_max_ps(largest);
        // Inputs that are no numbers are not to come out as some.
        const bool broken = _mm512_cmp_ps_mask(values[0], values[1], _CMP_UNORD_Q);
        rows.scales[row + g] = broken ? NAN : top / 127.0f;
        const __m512 inverse = _mm512_set1_ps(127.0f / std::max(top, 1e-30f));
        __m512i sum = _mm512_setzero_si512();
        for (const __m512& half : values) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(half, inverse));
            sum = _mm512_add_epi32(sum, rounded);
            alignas(16) int8_t bytes[16];
            _mm_store_si128((__m128i*)bytes, _mm512_cvtsepi32_epi8(rounded));
            for (int i = 0; i < 16; i += 4, codes += 4 * count) memcpy(codes, bytes + i, 4);
        }
        rows.sums[row + g] = _mm512_reduce_add_epi32(sum);
    }
}

inline __m512i four_codes(const int8_t* codes) {  // of a row, in all lanes
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

// A tile, group by group. 8 bits: codes + 128, [8][32 outputs][4 inputs]. 4 bits: codes + 8, [8][16 outputs][4 inputs],
// those of outputs 0..15 in the lower half of a byte and those of 16..31 above. Then 32 scales, and in 4 bits 32 centres
// (bfloat16).
struct Eight {
    static constexpr int CODES = TILE * GROUP, OFFSET = 128;
    static constexpr bool CENTRED = false;
    static inline void read(const uint8_t* codes, int step, __m512i& low, __m512i& high) {
        low = _mm512_loadu_si512(codes + 128 * step);
        high = _mm512_loadu_si512(codes + 128 * step + 64);
    }
};
struct Four {
    static constexpr int CODES = TILE * GROUP / 2, OFFSET = 8;
    static constexpr bool CENTRED = true;
    static inline void read(const uint8_t* codes, int step, __m512i& low, __m512i& high) {
        const __m512i both = _mm512_loadu_si512(codes + 64 * step), half = _mm512_set1_epi8(0x0f);
        low = _mm512_and_si512(both, half);
        high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    }
};
template <typename Bits>
constexpr int group_bytes = Bits::CODES + (Bits::CENTRED ? 2 : 1) * TILE * (int)sizeof(bf16);

template <typename Bits, int R, typename T>
inline void pass(const Rows& rows, int begin, const uint8_t* tile, long ahead, const float* bias, T* y, long y_row,
                 int outputs) {
    const int groups = rows.K / GROUP;
    const int8_t* codes = rows.codes.data() + (size_t)begin * rows.K;
    const int32_t* row_sums = rows.sums.data() + (size_t)begin * groups;
    const float* row_scales = rows.scales.data() + (size_t)begin * groups;
    __m512 totals[R][2];
    for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, tile += group_bytes<Bits>, codes += GROUP * R) {
        __m512i sums[R][2];
        for (int r = 0; r < R; r++)
            sums[r][0] = sums[r][1] = _mm512_set1_epi32(-Bits::OFFSET * row_sums[r * groups + g]);
        for (int byte = 0; byte < group_bytes<Bits>; byte += 64) fetch(tile + ahead + byte);
        for (int step = 0; step < GROUP / 4; step++) {
            __m512i low, high;
            Bits::read(tile, step, low, high);
            for (int r = 0; r < R; r++) {
                const __m512i four = four_codes(codes + 4 * (step * R + r));
                sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], low, four);
                sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], high, four);
            }
        }
        const bf16* scales = (const bf16*)(tile + Bits::CODES);
        for (int half = 0; half < 2; half++) {
            const __m512 scale = load(scales + 16 * half);
            for (int r = 0; r < R; r++) {
                __m512 product = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums[r][half]));
                if (Bits::CENTRED)
                    product = _mm512_fmadd_ps(load(scales + TILE + 16 * half),
                                              _mm512_set1_ps((float)row_sums[r * groups + g]), product);
                totals[r][half] =
                    _mm512_fmadd_ps(product, _mm512_set1_ps(row_scales[r * groups + g]), totals[r][half]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2 && outputs > 16 * half; half++) {
            const __mmask16 mask = first(outputs - 16 * half);
            const __m512 added = bias ? _mm512_maskz_loadu_ps(mask, bias + 16 * half) : _mm512_setzero_ps();
            store(y + r * y_row + 16 * half, _mm512_add_ps(totals[r][half], added), mask);
        }
}

template <typename Bits, int R, typename T>
inline void pass_of(int count, const Rows& rows, int begin, const uint8_t* tile, long ahead, const float* bias, T* y,
                    long y_row, int outputs) {
    if constexpr (R >= 1) {
        if (count == R)
            pass<Bits, R, T>(rows, begin, tile, ahead, bias, y, y_row, outputs);
        else
            pass_of<Bits, R - 1, T>(count, rows, begin, tile, ahead, bias, y, y_row, outputs);
    }
}

template <typename Bits, typename T>
void multiply(const T* x, long x_row, const uint8_t* weight, const float* bias, T* y, int M, int N, int K, int threads) {
    static thread_local Rows kept;  // its memory is used again
    Rows& rows = kept;
    const int tiles = (N + TILE - 1) / TILE, passes = (M + ROWS - 1) / ROWS;
    rows.K = K;
    rows.a_pass = passes ? (M + passes - 1) / passes : 1;
    rows.codes.resize((size_t)M * K);
    rows.sums.resize((size_t)M * (K / GROUP));
    rows.scales.resize((size_t)M * (K / GROUP));
    const long tile_bytes = (long)K / GROUP * group_bytes<Bits>;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int m = 0; m < M; m++) round_row(x + m * x_row, rows, m, M);
#pragma omp for schedule(static)
        for (int t = 0; t < tiles; t++)
            for (int p = 0; p < passes; p++) {
                // A lone pass reads on within the stream; the last of several fetches the next tile.
                const long ahead = passes == 1 ? PREFETCH : p == passes - 1 ? tile_bytes : 0;
                const int begin = p * rows.a_pass, count = std::min(rows.a_pass, M - begin);
                if (count > 0)
                    pass_of<Bits, ROWS, T>(count, rows, begin, weight + t * tile_bytes, ahead,
                                           bias ? bias + TILE * t : nullptr, y + (long)begin * N + TILE * t, N,
                                           std::min(TILE, N - TILE * t));
            }
    }
}

}  // namespace

EXPORT void multiply8_bf16(const bf16* x, long x_row, const uint8_t* weight, const float* bias, bf16* y, int M, int N,
                           int K, int threads) {
    multiply<Eight>(x, x_row, weight, bias, y, M, N, K, threads);
}
EXPORT void multiply8_f32(const float* x, long x_row, const uint8_t* weight, const float* bias, float* y, int M, int N,
                          int K, int threads) {
    multiply<Eight>(x, x_row, weight, bias, y, M, N, K, threads);
}
EXPORT void multiply4_bf16(const bf16* x, long x_row, const uint8_t* weight, const float* bias, bf16* y, int M, int N,
                           int K, int threads) {
    multiply<Four>(x, x_row, weight, bias, y, M, N, K, threads);
}
EXPORT void multiply4_f32(const float* x, long x_row, const uint8_t* weight, const float* bias, float* y, int M, int N,
                          int K, int threads) {
    multiply<Four>(x, x_row, weight, bias, y, M, N, K, threads);
}
