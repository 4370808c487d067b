// The activations of GDPA and their derivatives, on whole vectors. `native.py` numbers them; formulas are in activations.py.

#pragma once
#include "vectors.h"

namespace {

enum Activation : int32_t { IDENTITY, RELU, RELU2, LEAKY_RELU, GELU, GELU_TANH, SILU, HARDSWISH, SIGMOID };

// A quotient of polynomials, within 4e-7 of erf; 1 beyond 4.
inline vec erf_of(vec x) {
    x = x < -4.0f ? vec{} - 4.0f : x;
    x = x > 4.0f ? vec{} + 4.0f : x;
    const vec y = x * x;
    vec p = vec{} - 2.72614225801306e-10f;
    p = p * y + 2.77068142495902e-08f;
    p = p * y - 2.10102402082508e-06f;
    p = p * y - 5.69250639462346e-05f;
    p = p * y - 7.34990630326855e-04f;
    p = p * y - 2.95459980854025e-03f;
    p = p * y - 1.60960333262415e-02f;
    vec q = vec{} - 1.45660718464996e-05f;
    q = q * y - 2.13374055278905e-04f;
    q = q * y - 1.68282697438203e-03f;
    q = q * y - 7.37332916720468e-03f;
    q = q * y - 1.42647390514189e-02f;
    return x * p / q;
}

inline vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

// tanh(u) and du/dx of gelu_tanh.
struct Tanh {
    vec value, slope;
};

inline Tanh tanh_of(vec x) {
    const float root = 0.79788456f, cubic = 0.044715f;
    const vec u = root * (x + cubic * x * x * x);
    return {1.0f - 2.0f / (exp_of(2.0f * u) + 1.0f), root * (1.0f + 3.0f * cubic * x * x)};
}

// The value, and the derivative where it is asked for. A NaN stays one.
template <int32_t ACT, bool SLOPE>
inline vec activate(vec x, vec& slope) {
    const vec zero = {};
    if constexpr (ACT == IDENTITY) {
        if constexpr (SLOPE) slope = zero + 1.0f;
        return x;
    } else if constexpr (ACT == RELU) {
        if constexpr (SLOPE) slope = x <= 0.0f ? zero : zero + 1.0f;
        return x < 0.0f ? zero : x;
    } else if constexpr (ACT == RELU2) {
        const vec y = x < 0.0f ? zero : x;
        if constexpr (SLOPE) slope = 2.0f * y;
        return y * y;
    } else if constexpr (ACT == LEAKY_RELU) {
        if constexpr (SLOPE) slope = x > 0.0f ? zero + 1.0f : zero + 0.01f;
        return x > 0.0f ? x : x * 0.01f;
    } else if constexpr (ACT == GELU) {
        const vec phi = 0.5f + 0.5f * erf_of(x * 0.70710678f);
        if constexpr (SLOPE) slope = phi + x * 0.39894228f * exp_of(-0.5f * x * x);
        return x * phi;
    } else if constexpr (ACT == GELU_TANH) {
        const Tanh t = tanh_of(x);
        const vec half = 0.5f + 0.5f * t.value;
        if constexpr (SLOPE) slope = half + 0.5f * x * (1.0f - t.value * t.value) * t.slope;
        return x * half;
    } else if constexpr (ACT == SILU) {
        const vec s = sigmoid_of(x);
        if constexpr (SLOPE) slope = s * (1.0f + x * (1.0f - s));
        return x * s;
    } else if constexpr (ACT == HARDSWISH) {
        vec six = x + 3.0f;
        six = six < 0.0f ? zero : six;
        six = six > 6.0f ? zero + 6.0f : six;
        if constexpr (SLOPE) slope = x <= -3.0f ? zero : x >= 3.0f ? zero + 1.0f : x / 3.0f + 0.5f;
        return x * six / 6.0f;
    } else {
        const vec s = sigmoid_of(x);
        if constexpr (SLOPE) slope = s * (1.0f - s);
        return s;
    }
}

// s becomes act(s), and g, unless null, g act'(s); both are 0 where s is NEVER. n is a multiple of W.
template <int32_t ACT>
inline void activate_row(float* s, float* g, i64 n) {
    const vec zero = {};
    vec slope = {};
    if (!g) {
        for (i64 j = 0; j < n; j += W) {
            const vec x = load(s + j);
            *(vec*)(s + j) = x == NEVER ? zero : activate<ACT, false>(x, slope);
        }
        return;
    }
    for (i64 j = 0; j < n; j += W) {
        const vec x = load(s + j), y = activate<ACT, true>(x, slope);
        *(vec*)(s + j) = x == NEVER ? zero : y;
        *(vec*)(g + j) = x == NEVER ? zero : load(g + j) * slope;
    }
}

void activate_row(int32_t activation, float* s, float* g, i64 n) {
    switch (activation) {
        case IDENTITY: return activate_row<IDENTITY>(s, g, n);
        case RELU: return activate_row<RELU>(s, g, n);
        case RELU2: return activate_row<RELU2>(s, g, n);
        case LEAKY_RELU: return activate_row<LEAKY_RELU>(s, g, n);
        case GELU: return activate_row<GELU>(s, g, n);
        case GELU_TANH: return activate_row<GELU_TANH>(s, g, n);
        case SILU: return activate_row<SILU>(s, g, n);
        case HARDSWISH: return activate_row<HARDSWISH>(s, g, n);
        case SIGMOID: return activate_row<SIGMOID>(s, g, n);
    }
}

}  // namespace
