// headstart's kernels for CPUs with AVX-512: products with weights, attention over paths, norms and gates.
//
// Every kernel computes a row's result from that row alone, in an order that depends on nothing but the row's own
// length. So a token's numbers are equal to the last bit whether it is decoded alone, verified among the nodes of a
// tree, or read as part of a prompt, in bfloat16 as in float32. Speed follows from the same shape of loop: a tile of
// a weight is read from memory once for all rows, while the next one is on its way.
//
// Plain C calling convention, no dependency on torch's headers: infer/kernels/build.py compiles this file at first
// use and infer/kernels/*.py call it. The references are the torch functions named there.

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int ROWS = 14;       // rows that one pass over a tile serves: 28 of 32 registers hold their sums
constexpr int BLOCK = 16;      // positions whose scores are found together
constexpr int MAX_GROUP = 16;  // query heads of one key/value head

// exp(x) for x <= 88; 0 below -87. Relative error 2e-7.
inline __m512 exponential(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, _mm512_setzero_ps());
}

// ---------------------------------------------------------------------------------------------------------------------
// Products: y[M, N] = x[M, K] @ weight[N, K]^T + bias[N].
//
// The weight comes in tiles of 32 outputs. bfloat16: [K/2][32][2], pairs of inputs beside each other, as the
// processor's dot product takes them. float32: [K][32]. A sum runs over the inputs in order, whatever the rows.

struct Ahead {  // what to fetch from memory while a pass runs: `lines` cache lines a step, from `from` on
    const char* from;
    int lines;
    inline void fetch(long step) const {
        if (lines == 2) {
            ::fetch(from + step * 128);
            ::fetch(from + step * 128 + 64);
        } else if (lines == 1) {
            ::fetch(from + step * 64);
        }
    }
};

// The two products of a vector of weights with one input (float32) or a pair of inputs (bfloat16) of a row.
inline __m512 grown(__m512 sum, __m512bh weights, const bf16* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi32(pair));
}
inline __m512 grown(__m512 sum, __m512 weights, const float* x) {
    return _mm512_fmadd_ps(weights, _mm512_set1_ps(*x), sum);
}
inline __m512bh vector_of(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512 vector_of(const float* p) { return _mm512_loadu_ps(p); }

template <int R, typename T>
inline void pass(const T* x, long x_row, const T* tile, const float* bias, T* y, long y_row, int outputs, int K,
                 Ahead ahead) {
    constexpr int step = sizeof(float) / sizeof(T);  // inputs that go into one vector
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    const int steps = K / step;
    for (int k = 0; k < steps; k++) {
        ahead.fetch(k);
        const auto low = vector_of(tile), high = vector_of(tile + 16 * step);
        tile += TILE * step;
        for (int r = 0; r < R; r++) {
            sums[r][0] = grown(sums[r][0], low, x + r * x_row + k * step);
            sums[r][1] = grown(sums[r][1], high, x + r * x_row + k * step);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            const int left = outputs - 16 * half;
            if (left <= 0) break;
            const __mmask16 mask = first(left);
            const __m512 added = bias ? _mm512_maskz_loadu_ps(mask, bias + 16 * half) : _mm512_setzero_ps();
            store(y + r * y_row + 16 * half, _mm512_add_ps(sums[r][half], added), mask);
        }
}

template <int R, typename T>
inline void pass_of(int rows, const T* x, long x_row, const T* tile, const float* bias, T* y, long y_row, int outputs,
                    int K, Ahead ahead) {
    if constexpr (R >= 1) {
        if (rows == R)
            pass<R, T>(x, x_row, tile, bias, y, y_row, outputs, K, ahead);
        else
            pass_of<R - 1, T>(rows, x, x_row, tile, bias, y, y_row, outputs, K, ahead);
    }
}

template <typename T>
void multiply(const T* x, long x_row, const T* weight, const float* bias, T* y, long y_row, int M, int N, int K,
              int threads) {
    const int tiles = (N + TILE - 1) / TILE;
    const int passes = (M + ROWS - 1) / ROWS;
    const int rows_a_pass = passes ? (M + passes - 1) / passes : 0;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < tiles; t++) {
        const T* tile = weight + (long)t * TILE * K;
        const int outputs = std::min(TILE, N - TILE * t);
        const long tile_bytes = (long)TILE * K * sizeof(T);
        for (int p = 0; p < passes; p++) {
            // One pass reads on within the stream; the first two of several share the next tile between them.
            const char* here = (const char*)tile;
            const Ahead ahead = passes == 1 ? Ahead{here + PREFETCH, 2}
                                            : Ahead{here + tile_bytes + p * tile_bytes / 2, p < 2 ? 1 : 0};
            const int begin = p * rows_a_pass, rows = std::min(rows_a_pass, M - begin);
            if (rows > 0)
                pass_of<ROWS, T>(rows, x + begin * x_row, x_row, tile, bias ? bias + TILE * t : nullptr,
                                 y + begin * y_row + TILE * t, y_row, outputs, K, ahead);
        }
    }
}

}  // namespace

struct ProductCall {
    const void *x, *weight;
    const float* bias;  // null for none
    void* y;            // [rows, outputs], contiguous, as x [rows, inputs] is
    int32_t rows, outputs, inputs, threads;
};

namespace {

template <typename T>
void multiply_all(const ProductCall& call) {
    multiply<T>((const T*)call.x, call.inputs, (const T*)call.weight, call.bias, (T*)call.y, call.outputs, call.rows,
                call.outputs, call.inputs, call.threads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of rows over their own paths.
//
// A row at position t sees the positions 0 .. t, or the last `window` of them. Those of its request's prefix lie in order
// in the cache; those of its own branch of a tree lie where its group's mask says, in order too. The result is one
// function of the keys and values in order of position, wherever they lie and whoever else is in the forward.

inline __m512 product(const bf16* a, const bf16* b, __m512 sum) {  // of 32 numbers
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}
inline __m512 product(const float* a, const float* b, __m512 sum) {
    sum = _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), sum);
    return _mm512_fmadd_ps(_mm512_loadu_ps(a + 16), _mm512_loadu_ps(b + 16), sum);
}

// Lane i of the result is the sum over the lanes of vectors[i], always in the same order.
inline __m512 lane_sums(const __m512 (&vectors)[16]) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(vectors[2 * i], vectors[2 * i + 1]),
                                 _mm512_unpackhi_ps(vectors[2 * i], vectors[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d low = _mm512_castps_pd(pairs[2 * i]), high = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    // Each of `fours` holds, in every quarter, the sums of four vectors over that quarter.
    __m512 twos[2];
    for (int i = 0; i < 2; i++)
        twos[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(twos[0], twos[1], 0x88), _mm512_shuffle_f32x4(twos[0], twos[1], 0xdd));
}

template <typename T>
struct Cache {
    const T *keys, *values;  // of one key/value head, each [columns, D]
};

// Where the positions of a row lie.
struct Path {
    long base;            // column of position 0
    int prefix;           // so many positions lie in order from there on
    const int64_t* rest;  // the columns of those that follow
    inline long column(int position) const { return position < prefix ? base + position : rest[position - prefix]; }
};

// outputs[g] = sum over positions of weights[g] * values, times shares[g]; G heads, 64 numbers of each at a time.
template <int G, int D, typename T>
inline void add_values(const float* weights, long weight_row, const float* shares, const Cache<T>& cache,
                       const Path& path, int start, int length, T* const* outputs) {
    constexpr int CHUNK = D % 64 == 0 ? 64 : 32, VECTORS = CHUNK / 16;
    for (int from = 0; from < D; from += CHUNK) {
        __m512 sums[G][VECTORS];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < VECTORS; v++) sums[g][v] = _mm512_setzero_ps();
        for (int t = start; t < length; t++) {
            const T* value = cache.values + path.column(t) * D + from;
            for (int v = 0; v < VECTORS; v++) {
                const __m512 numbers = load(value + 16 * v);
                for (int g = 0; g < G; g++)
                    sums[g][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[g * weight_row + t - start]), numbers, sums[g][v]);
            }
        }
        for (int g = 0; g < G; g++)
            for (int v = 0; v < VECTORS; v++)
                store(outputs[g] + from + 16 * v, _mm512_mul_ps(sums[g][v], _mm512_set1_ps(shares[g])), 0xffff);
    }
}

// `room`: numbers to work in, MAX_GROUP rows of `room_row`, a multiple of 16 that holds the positions seen.
template <int D, typename T>
inline void attend(const T* const* queries, int group, const Cache<T>& cache, const Path& path, int start, int length,
                   float scale, T* const* outputs, float* room, long room_row) {
    static_assert(D % 32 == 0, "a head is read 32 numbers at a time");
    for (int begin = start; begin < length; begin += BLOCK) {
        const int count = std::min(BLOCK, length - begin);
        const T* keys[BLOCK];
        for (int i = 0; i < BLOCK; i++) keys[i] = cache.keys + path.column(begin + std::min(i, count - 1)) * D;
        for (int g = 0; g < group; g++) {
            __m512 dots[BLOCK];
            for (int i = 0; i < BLOCK; i++) {
                dots[i] = _mm512_setzero_ps();
                for (int d = 0; d < D; d += 32) dots[i] = product(queries[g] + d, keys[i] + d, dots[i]);
            }
            const __m512 scores = _mm512_mul_ps(lane_sums(dots), _mm512_set1_ps(scale));
            _mm512_store_ps(room + g * room_row + begin - start,
                            _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first(count), scores));
        }
    }
    float shares[MAX_GROUP];
    for (int g = 0; g < group; g++) {
        float* weights = room + g * room_row;
        __m512 largest = _mm512_load_ps(weights), total = _mm512_setzero_ps();
        for (int t = 16; t < length - start; t += 16) largest = _mm512_max_ps(largest, _mm512_load_ps(weights + t));
        largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
        for (int t = 0; t < length - start; t += 16) {
            const __m512 these = exponential(_mm512_sub_ps(_mm512_load_ps(weights + t), largest));
            total = _mm512_add_ps(total, these);
            _mm512_store_ps(weights + t, these);
        }
        shares[g] = 1.0f / _mm512_reduce_add_ps(total);
    }
    for (int g = 0; g < group; g += 4) {
        const float* weights = room + g * room_row;
        switch (std::min(group - g, 4)) {
            case 1: add_values<1, D>(weights, room_row, shares + g, cache, path, start, length, outputs + g); break;
            case 2: add_values<2, D>(weights, room_row, shares + g, cache, path, start, length, outputs + g); break;
            case 3: add_values<3, D>(weights, room_row, shares + g, cache, path, start, length, outputs + g); break;
            case 4: add_values<4, D>(weights, room_row, shares + g, cache, path, start, length, outputs + g); break;
        }
    }
}

}  // namespace

struct GroupOfRows {      // of one request, as infer/rows.py has them
    int64_t base;         // column of the request's position 0
    const uint8_t* mask;  // [rows, width]: which columns from `prefix` on each row sees; null for a chain
    int32_t prefix, offset, rows, width;
};

struct AttentionCall {
    const void *query, *key, *value;   // [Hq, R, D], [K, R, D], [K, R, D]: strides below, in numbers
    const void *cosines, *sines;       // [R, D], to turn queries and keys by; null where they are turned already
    void *cached_keys, *cached_values; // [K, columns, D]
    void* output;                      // [R, Hq, D], contiguous
    const GroupOfRows* groups;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row, cache_head;
    int32_t num_groups, rows, window, query_heads, key_heads, head_size, threads;
    float scale;
};

namespace {

// Rotary embedding by halves, with the roundings of the stock models: turned = x * cos + (-x2, x1) * sin.
template <int D, typename T>
inline void turn(const T* x, const T* cosines, const T* sines, T* turned) {
    for (int d = 0; d < D; d += 16) {
        const int other = d < D / 2 ? d + D / 2 : d - D / 2;
        const __m512 here = round_as(x, _mm512_mul_ps(load(x + d), load(cosines + d)));
        const __m512 there = round_as(x, _mm512_mul_ps(load(x + other), load(sines + d)));
        store(turned + d, d < D / 2 ? _mm512_sub_ps(here, there) : _mm512_add_ps(here, there), 0xffff);
    }
}

struct Row {
    long column;  // where its own keys go
    Path path;
    int start, length;
};

// `columns` holds the paths' columns that do not lie in order.
std::vector<Row> rows_of(const AttentionCall& call, std::vector<int64_t>& columns) {
    std::vector<Row> rows;
    rows.reserve(call.rows);
    size_t most = 0;
    for (int g = 0; g < call.num_groups; g++)
        if (call.groups[g].mask) most += (size_t)call.groups[g].rows * call.groups[g].width;
    columns.reserve(most);  // so that pointers into it stay
    for (int g = 0; g < call.num_groups; g++) {
        const GroupOfRows& group = call.groups[g];
        for (int r = 0; r < group.rows; r++) {
            const int64_t* rest = columns.data() + columns.size();
            int prefix = group.prefix, length = group.prefix;
            if (!group.mask) {
                prefix = length = group.prefix + r + 1;
            } else {
                const uint8_t* seen = group.mask + (long)r * group.width;
                for (int c = 0; c < group.width; c++)
                    if (seen[c]) columns.push_back(group.base + group.prefix + c), length++;
            }
            const int start = call.window ? std::max(0, length - call.window) : 0;
            rows.push_back(
                {group.base + group.prefix + group.offset + r, {(long)group.base, prefix, rest}, start, length});
        }
    }
    return rows;
}

template <int D, typename T>
void attend_all(const AttentionCall& call) {
    const T *cosines = (const T*)call.cosines, *sines = (const T*)call.sines;
    const int group = call.query_heads / call.key_heads;
    const T *query = (const T*)call.query, *key = (const T*)call.key, *value = (const T*)call.value;
    T *keys = (T*)call.cached_keys, *values = (T*)call.cached_values, *output = (T*)call.output;
    std::vector<int64_t> columns;
    const std::vector<Row> rows = rows_of(call, columns);
    int longest = 0;
    for (const Row& row : rows) longest = std::max(longest, row.length - row.start);
    const long room_row = (longest + 15) / 16 * 16;
    for (int h = 0; h < call.key_heads; h++)
        for (int r = 0; r < call.rows; r++) {
            const long place = h * call.cache_head + rows[r].column * D;
            const T* new_key = key + h * call.key_head + r * call.key_row;
            if (cosines)
                turn<D, T>(new_key, cosines + (long)r * D, sines + (long)r * D, keys + place);
            else
                memcpy(keys + place, new_key, D * sizeof(T));
            memcpy(values + place, value + h * call.value_head + r * call.value_row, D * sizeof(T));
        }
#pragma omp parallel num_threads(call.threads)
    {
        float* room = (float*)std::aligned_alloc(64, group * room_row * sizeof(float));
#pragma omp for collapse(2) schedule(static)
        for (int h = 0; h < call.key_heads; h++)
            for (int r = 0; r < call.rows; r++) {
                const T* queries[MAX_GROUP];
                T* outputs[MAX_GROUP];
                T turned[MAX_GROUP][D] __attribute__((aligned(64)));
                for (int g = 0; g < group; g++) {
                    const long head = (long)h * group + g;
                    queries[g] = query + head * call.query_head + r * call.query_row;
                    if (cosines) {
                        turn<D, T>(queries[g], cosines + (long)r * D, sines + (long)r * D, turned[g]);
                        queries[g] = turned[g];
                    }
                    outputs[g] = output + ((long)r * call.query_heads + head) * D;
                }
                const Cache<T> cache{keys + h * call.cache_head, values + h * call.cache_head};
                attend<D, T>(queries, group, cache, rows[r].path, rows[r].start, rows[r].length, call.scale, outputs,
                             room, room_row);
            }
        std::free(room);
    }
}

template <typename T>
int attend_sized(const AttentionCall& call) {
    if (call.query_heads / call.key_heads > MAX_GROUP) return 1;
    switch (call.head_size) {
        case 32: attend_all<32, T>(call); return 0;
        case 64: attend_all<64, T>(call); return 0;
        case 96: attend_all<96, T>(call); return 0;
        case 128: attend_all<128, T>(call); return 0;
        case 256: attend_all<256, T>(call); return 0;
    }
    return 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms and gates, with the roundings of the stock modules.

template <typename T>
void normalise(const T* x, const T* weight, T* y, int M, int H, float eps) {
    for (int m = 0; m < M; m++, x += H, y += H) {
        __m512 squares = _mm512_setzero_ps();
        for (int h = 0; h < H; h += 16) {
            const __m512 values = load(x + h, first(H - h));
            squares = _mm512_fmadd_ps(values, values, squares);
        }
        const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / H + eps));
        for (int h = 0; h < H; h += 16) {
            const __mmask16 mask = first(H - h);
            const __m512 normed = round_as(x, _mm512_mul_ps(load(x + h, mask), scale));
            store(y + h, _mm512_mul_ps(normed, load(weight + h, mask)), mask);
        }
    }
}

// y[M, I] = silu(x[:, :I]) * x[:, I:]
template <typename T>
void gate(const T* x, T* y, int M, int I, int threads) {
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for schedule(static) num_threads(threads) if (M >= 8)
    for (int m = 0; m < M; m++) {
        const T *gates = x + (long)m * 2 * I, *ups = gates + I;
        for (int i = 0; i < I; i += 16) {
            const __mmask16 mask = first(I - i);
            const __m512 values = load(gates + i, mask);
            const __m512 below = _mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), values), _mm512_set1_ps(88.0f));
            const __m512 opened = round_as(x, _mm512_div_ps(values, _mm512_add_ps(one, exponential(below))));
            store(y + (long)m * I + i, _mm512_mul_ps(opened, load(ups + i, mask)), mask);
        }
    }
}

}  // namespace

// A whole decoder layer as Llama has it: attention around a residual, then a normed, gated MLP around another.
struct LayerCall {
    AttentionCall attention;                  // but for what passes through the layer
    const void *inputs, *residual;            // [rows, input_size] and [rows, hidden]; no inputs: the residual, normed
    void* result;                             // [rows, hidden]
    const void *first_norm, *norm;            // weights [hidden]
    const void *project, *output, *gate_up, *down;  // in tiles
    const float *project_bias, *output_bias;  // null for none
    int32_t input_size, hidden, intermediate;
    float first_epsilon, epsilon;
};

namespace {

template <typename T>
void add(const T* x, const T* y, T* sum, long count) {
    for (long i = 0; i < count; i += 16) {
        const __mmask16 mask = first((int)std::min(count - i, 16L));
        store(sum + i, _mm512_add_ps(load(x + i, mask), load(y + i, mask)), mask);
    }
}

template <typename T>
int run_layer(const LayerCall& call) {
    AttentionCall attention = call.attention;
    const int rows = attention.rows, threads = attention.threads, H = call.hidden, I = call.intermediate;
    const long D = attention.head_size, queries = attention.query_heads * D, keys = attention.key_heads * D;
    const long width = queries + 2 * keys;
    // Each buffer begins at a cache line.
    auto aligned = [](long numbers) { return (numbers + 31) / 32 * 32; };
    T* scratch = (T*)std::aligned_alloc(
        64, sizeof(T) * (2 * aligned((long)rows * H) + aligned(rows * width) + aligned(rows * queries) +
                         aligned((long)rows * 2 * I) + aligned((long)rows * I)));
    T *normed = scratch, *product = normed + aligned((long)rows * H), *projected = product + aligned((long)rows * H);
    T *attended = projected + aligned(rows * width), *halves = attended + aligned(rows * queries);
    T* gated = halves + aligned((long)rows * 2 * I);
    T* states = (T*)call.result;
    const T *residual = (const T*)call.residual, *inputs = (const T*)call.inputs;
    if (!inputs) {
        normalise(residual, (const T*)call.first_norm, normed, rows, H, call.first_epsilon);
        inputs = normed;
    }
    multiply(inputs, call.input_size, (const T*)call.project, call.project_bias, projected, width, rows, width,
             call.input_size, threads);
    attention.query = projected;
    attention.key = projected + queries;
    attention.value = projected + queries + keys;
    attention.output = attended;
    attention.query_head = attention.key_head = attention.value_head = D;
    attention.query_row = attention.key_row = attention.value_row = width;
    const int refused = attend_sized<T>(attention);
    if (!refused) {
        multiply(attended, queries, (const T*)call.output, call.output_bias, product, H, rows, H, queries, threads);
        add(residual, product, states, (long)rows * H);
        normalise(states, (const T*)call.norm, normed, rows, H, call.epsilon);
        multiply(normed, H, (const T*)call.gate_up, (const float*)nullptr, halves, 2 * I, rows, 2 * I, H, threads);
        gate(halves, gated, rows, I, threads);
        multiply(gated, I, (const T*)call.down, (const float*)nullptr, product, H, rows, H, I, threads);
        add(states, product, states, (long)rows * H);
    }
    std::free(scratch);
    return refused;
}

}  // namespace

EXPORT int layer_bf16(const LayerCall* call) { return run_layer<bf16>(*call); }
EXPORT int layer_f32(const LayerCall* call) { return run_layer<float>(*call); }
EXPORT void multiply_bf16(const ProductCall* call) { multiply_all<bf16>(*call); }
EXPORT void multiply_f32(const ProductCall* call) { multiply_all<float>(*call); }
EXPORT int attend_bf16(const AttentionCall* call) { return attend_sized<bf16>(*call); }
EXPORT int attend_f32(const AttentionCall* call) { return attend_sized<float>(*call); }
EXPORT void normalise_bf16(const bf16* x, const bf16* weight, bf16* y, int M, int H, float eps) {
    normalise<bf16>(x, weight, y, M, H, eps);
}
EXPORT void normalise_f32(const float* x, const float* weight, float* y, int M, int H, float eps) {
    normalise<float>(x, weight, y, M, H, eps);
}
EXPORT void gate_bf16(const bf16* x, bf16* y, int M, int I, int threads) { gate<bf16>(x, y, M, I, threads); }
EXPORT void gate_f32(const float* x, float* y, int M, int I, int threads) { gate<float>(x, y, M, I, threads); }
