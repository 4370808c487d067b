// Vectors, a small matrix product, e^x and scratch memory: what the CPU kernels are made of. GCC's vector types, so that it
// compiles for any machine that GCC or Clang serve.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int64_t i64;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

namespace {

inline vec load(const float* p) { return *(const vec*)p; }
inline i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }

// C [MR, NV * W] (+)= A B over `depth`; A by strides, B and C by rows.
template <int MR, int NV>
inline void tile(i64 depth, const float* a, i64 a_row, i64 a_col, const float* b, i64 ldb, float* c, i64 ldc, bool add) {
    vec sum[MR][NV];  // in registers, hence every loop over it is unrolled
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) sum[m][n] = add ? load(c + m * ldc + n * W) : vec{};
    for (i64 k = 0; k < depth; k++) {
        vec row[NV];
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) row[n] = load(b + k * ldb + n * W);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            const float x = a[m * a_row + k * a_col];
#pragma GCC unroll 16
            for (int n = 0; n < NV; n++) sum[m][n] += x * row[n];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) *(vec*)(c + m * ldc + n * W) = sum[m][n];
}

template <int NV>
inline void panel(i64 rows, i64 depth, const float* a, i64 a_row, i64 a_col, const float* b, i64 ldb, float* c, i64 ldc,
                  bool add) {
    i64 m = 0;
    for (; m + 6 <= rows; m += 6) tile<6, NV>(depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc, add);
    a += m * a_row, c += m * ldc;
    switch (rows - m) {
        case 1: return tile<1, NV>(depth, a, a_row, a_col, b, ldb, c, ldc, add);
        case 2: return tile<2, NV>(depth, a, a_row, a_col, b, ldb, c, ldc, add);
        case 3: return tile<3, NV>(depth, a, a_row, a_col, b, ldb, c, ldc, add);
        case 4: return tile<4, NV>(depth, a, a_row, a_col, b, ldb, c, ldc, add);
        case 5: return tile<5, NV>(depth, a, a_row, a_col, b, ldb, c, ldc, add);
    }
}

// C [rows, cols] (+)= A [rows, depth] B [depth, cols]; cols is a multiple of W.
void product(i64 rows, i64 cols, i64 depth, const float* a, i64 a_row, i64 a_col, const float* b, i64 ldb, float* c,
             i64 ldc, bool add = false) {
    i64 n = 0;
    for (; n + 2 * W <= cols; n += 2 * W) panel<2>(rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, add);
    if (n < cols) panel<1>(rows, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, add);
}

float sum_of(vec x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

float max_of(vec x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = std::max(top, x[i]);
    return top;
}

// e^x to about 1 ulp: x = n ln 2 + r, a polynomial for e^r, n into the exponent. Exactly 0 below -87 and for -inf.
inline vec exp_of(vec x) {
    const vec zero = {};
    vec y = x < -87.0f ? zero - 87.0f : x;
    y = y > 88.0f ? zero + 88.0f : y;
    const vec shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are the rounded integer
    const vec n = shifted - 12582912.0f;
    const vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec bits = ((ivec)shifted << 23) + (127 << 23);
    p *= (vec)bits;
    p = x > 88.0f ? zero + std::numeric_limits<float>::infinity() : p;
    p = x != x ? x : p;
    return x < -87.0f ? zero : p;
}

// Growing scratch memory of one thread, in pieces that begin with a line of the cache, lest vectors lie across two of them.
struct Scratch {
    static constexpr size_t LINE = 16;  // floats of a line of the cache
    std::vector<float> memory;
    size_t used = 0;
    // Room for `wanted` floats in at most `pieces` pieces.
    void reset(size_t wanted, size_t pieces) {
        used = 0;
        wanted += (pieces + 1) * LINE;
        if (memory.size() < wanted) memory.resize(wanted);
    }
    float* take(size_t n) {
        float* p = memory.data() + (LINE - (uintptr_t)memory.data() / sizeof(float) % LINE) % LINE + used;
        used += (n + LINE - 1) / LINE * LINE;
        return p;
    }
};

// Rows whose features can be loaded in whole vectors: the tensor's own, or a copy padded with zeros.
struct Rows {
    const float* p;
    i64 ld;
};

Rows rows_of(const float* p, i64 stride, i64 n, i64 d, Scratch& scratch) {
    if (d % W == 0) return {p, stride};
    const i64 ld = round_up(d, W);
    float* copy = scratch.take(n * ld);
    for (i64 i = 0; i < n; i++) {
        std::memcpy(copy + i * ld, p + i * stride, d * sizeof(float));
        std::fill(copy + i * ld + d, copy + (i + 1) * ld, 0.0f);
    }
    return {copy, ld};
}

// [n, d] -> [d, ld], zeros in columns n to ld.
const float* transposed(const float* p, i64 stride, i64 n, i64 d, i64 ld, Scratch& scratch) {
    float* out = scratch.take(d * ld);
    i64 j = 0;
    for (; j + W <= n; j += W)  // a vector of each row of the result at a time: both sides stay in the cache
        for (i64 c = 0; c < d; c++) {
            vec column;
            for (int i = 0; i < W; i++) column[i] = p[(j + i) * stride + c];
            *(vec*)(out + c * ld + j) = column;
        }
    for (i64 c = 0; c < d; c++)
        for (i64 i = j; i < ld; i++) out[c * ld + i] = i < n ? p[i * stride + c] : 0.0f;
    return out;
}

// Run `work` on so many threads: those of OpenMP where the compiler has it, which PyTorch and compiled graphs use too and which
// still spin when one of these kernels follows on theirs. Otherwise only the caller's, and the caller brings several.
template <class Work>
void on_threads(int64_t threads, Work work) {
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    work();
#else
    (void)threads;
    work();
#endif
}

}  // namespace
