// Softmax attention and GDPA of packed sequences for the CPU, fp32: no dense batch, no padding, no gather.
//
// One task is one sequence and one key head. With S = scale Q K^T + bias, P = exp(S - lse) where visible, keep and r the
// dropout mask and 1 / (1 - p):
//
//     O = r (keep P) V    dP = r keep (dO V^T)    dS = P (dP - rowsum(P dP))
//     dQ = scale dS K     dK = scale dS^T Q       dV = r (keep P)^T dO         dbias = dS
//
// and for GDPA P = act(S), dS = act'(S) dP, where O, dP and dV have the factor post_scale.
//
// Scores of a block of queries stay in the cache; keys that no query of the block sees are skipped. FLOPs 2 H (D + Dv)
// sum(q_i k_i) forward, 2.5 times that backward; bytes: every tensor once. All products run through one small matrix
// product in GCC's vector types, so this compiles for any machine that GCC or Clang serve. The meaning of every field of
// Call is that of gemopt.ops.jagged_attention.

#include <atomic>

#include "activations.h"
#include "vectors.h"

struct Call {
    const float *q, *k, *v, *dout, *lse_in;  // features dense; row and head strides below
    float *out, *lse, *dq, *dk, *dv;         // contiguous
    const i64 *q_offsets, *k_offsets, *q_pos, *k_pos;
    const float* bias;
    const uint8_t* mask;
    float* dbias;      // parts x [B or 1, H or 1, Lq or 1, Lk or 1], zeros
    const int32_t* activations;  // of every head of the queries; null for a softmax
    const i64* order;  // sequences, in the order in which they are taken
    std::atomic<i64>* next;
    i64 sequences, parts, heads, kv_heads, d, dv_size;
    i64 q_stride[2], k_stride[2], v_stride[2], dout_stride[2];
    i64 bias_stride[4], mask_stride[4], dbias_stride[4], dbias_size;
    i64 left, right;  // -1: unlimited
    int32_t causal, bottom_right, dropout;
    float scale, multiplier, post_scale;
    uint32_t threshold, seed_low, seed_high;
};

namespace {

uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Sequence {
    const Call& call;
    i64 b, head;          // head of the queries
    i64 q_start, k_start;
    i64 lq, lk;
    i64 shift;

    i64 q_position(i64 i) const { return call.q_pos ? call.q_pos[q_start + i] : i; }
    i64 k_position(i64 j) const { return call.k_pos ? call.k_pos[k_start + j] : j; }
    bool positions() const { return call.q_pos || call.k_pos; }

    // Keys [low, high) that query i can see by its row; all of them where positions decide.
    void range(i64 i, i64& low, i64& high) const {
        low = 0, high = lk;
        if (positions()) return;
        const i64 at = i + shift;
        if (call.causal) high = std::min(high, at + 1);
        if (call.right >= 0 && call.right < lk - at) high = std::min(high, at + call.right + 1);  // without overflow
        if (call.left >= 0 && call.left < at) low = std::max(low, at - call.left);
        high = std::max(high, (i64)0);
        low = std::min(low, high);
    }

    // One row of scores, columns [first, first + n), n a multiple of W: scale, bias, and -inf where not visible.
    void finish(i64 i, float* s, i64 first, i64 n) const {
        const Call& c = call;
        for (i64 j = 0; j < n; j += W) *(vec*)(s + j) = load(s + j) * c.scale;
        const i64 at = q_position(i);
        const i64 stop = std::min(n, lk - first);
        if (c.bias) {
            const float* row = c.bias + b * c.bias_stride[0] + head * c.bias_stride[1] + at * c.bias_stride[2];
            for (i64 j = 0; j < stop; j++) s[j] += row[k_position(first + j) * c.bias_stride[3]];
        }
        if (c.mask) {
            const uint8_t* row = c.mask + b * c.mask_stride[0] + head * c.mask_stride[1] + at * c.mask_stride[2];
            for (i64 j = 0; j < stop; j++)
                if (!row[k_position(first + j) * c.mask_stride[3]]) s[j] = NEVER;
        }
        if (positions()) {
            for (i64 j = 0; j < stop; j++) {
                const i64 step = k_position(first + j) - at;
                if ((c.causal && step > 0) || (c.right >= 0 && step > c.right) || (c.left >= 0 && step < -c.left))
                    s[j] = NEVER;
            }
        }
        i64 low, high;
        range(i, low, high);
        std::fill(s, s + std::clamp(low - first, (i64)0, n), NEVER);
        std::fill(s + std::clamp(high - first, (i64)0, n), s + n, NEVER);
    }

    // r keep of row i and keys [first, first + n).
    void kept(i64 i, float* keep, i64 first, i64 n) const {
        uint32_t word[2] = {0x243F6A88u, 0xB7E15162u};
        for (uint32_t& h : word)
            for (uint32_t x : {call.seed_low, call.seed_high, (uint32_t)head * 0x9E3779B9u, (uint32_t)(q_start + i)})
                h = mix(h ^ x);
        for (i64 j = 0; j < n; j++) {
            uint32_t x = word[0] ^ ((uint32_t)(first + j) * 0x9E3779B9u);
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x ^= word[1];
            x = (x ^ (x >> 15)) * 0x846CA68Bu;
            x ^= x >> 16;
            keep[j] = x >= call.threshold ? call.multiplier : 0.0f;
        }
    }
};

// How many queries share a pass over the keys: their scores fill about half a first-level cache.
i64 block_rows(i64 lk) { return std::clamp((i64)6144 / round_up(std::max(lk, (i64)1), W) / 6 * 6, (i64)6, (i64)48); }

// First and last column that the queries a..b see, in whole vectors.
void span(const Sequence& s, i64 a, i64 b, i64& first, i64& n) {
    i64 low = s.lk, high = 0;
    for (i64 i = a; i < b; i++) {
        i64 l, h;
        s.range(i, l, h);
        if (l < h) low = std::min(low, l), high = std::max(high, h);
    }
    first = std::min(low, high) / W * W;
    n = round_up(std::max(high - first, (i64)0), W);
}

// A row of n scores becomes e^(s - max); its lse is written, and the factor that makes the weights sum to 1 returned.
float weigh(const Sequence& s, i64 i, float* p, i64 n) {
    vec top = vec{} + NEVER, total = {};
    for (i64 j = 0; j < n; j += W) top = load(p + j) > top ? load(p + j) : top;
    const float most = max_of(top), safe = most == NEVER ? 0.0f : most;
    for (i64 j = 0; j < n; j += W) {
        const vec e = exp_of(load(p + j) - safe);
        total += e;
        *(vec*)(p + j) = e;
    }
    const float sum = sum_of(total);
    s.call.lse[(s.q_start + i) * s.call.heads + s.head] = std::log(sum) + safe;
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

void forward_task(const Call& c, i64 b, i64 kv_head, Scratch& scratch) {
    Sequence s{c, b, 0, c.q_offsets[b], c.k_offsets[b], c.q_offsets[b + 1] - c.q_offsets[b],
               c.k_offsets[b + 1] - c.k_offsets[b], 0};
    s.shift = c.bottom_right ? s.lk - s.lq : 0;
    const i64 sharing = c.heads / c.kv_heads, ld = round_up(s.lk, W), dvp = round_up(c.dv_size, W);
    const i64 block = block_rows(s.lk);
    scratch.reset(c.d * ld + s.lk * dvp + block * (ld + dvp) + ld, 16);
    if (s.lq == 0) return;
    const float* k = c.k + s.k_start * c.k_stride[0] + kv_head * c.k_stride[1];
    const float* v = c.v + s.k_start * c.v_stride[0] + kv_head * c.v_stride[1];
    const float* kt = transposed(k, c.k_stride[0], s.lk, c.d, ld, scratch);
    const Rows values = rows_of(v, c.v_stride[0], s.lk, c.dv_size, scratch);
    float *scores = scratch.take(block * ld), *result = scratch.take(block * dvp), *keep = scratch.take(ld);
    for (s.head = kv_head * sharing; s.head < (kv_head + 1) * sharing; s.head++) {
        const float* q = c.q + s.q_start * c.q_stride[0] + s.head * c.q_stride[1];
        for (i64 a = 0; a < s.lq; a += block) {
            const i64 rows = std::min(block, s.lq - a);
            i64 first, n;
            span(s, a, a + rows, first, n);
            product(rows, n, c.d, q + a * c.q_stride[0], c.q_stride[0], 1, kt + first, ld, scores, ld);
            float scale_by[48];
            for (i64 i = 0; i < rows; i++) {
                float* p = scores + i * ld;
                s.finish(a + i, p, first, n);
                if (c.activations) {
                    activate_row(c.activations[s.head], p, nullptr, n);
                    scale_by[i] = c.post_scale;
                } else {
                    scale_by[i] = weigh(s, a + i, p, n);
                }
                if (c.dropout) {
                    s.kept(a + i, keep, first, n);
                    for (i64 j = 0; j < n; j++) p[j] *= keep[j];
                }
            }
            product(rows, dvp, std::min(n, s.lk - first), scores, ld, 1, values.p + first * values.ld, values.ld, result, dvp);
            for (i64 i = 0; i < rows; i++) {
                float* to = c.out + ((s.q_start + a + i) * c.heads + s.head) * c.dv_size;
                for (i64 x = 0; x < c.dv_size; x++) to[x] = result[i * dvp + x] * scale_by[i];
            }
        }
    }
}

// P into p and dS into dp, which has dP.
void softmax_gradient(const Sequence& s, i64 i, float* p, float* dp, i64 n) {
    const float lse = s.call.lse_in[(s.q_start + i) * s.call.heads + s.head], safe = lse == NEVER ? 0.0f : lse;
    vec ones = {};
    for (i64 j = 0; j < n; j += W) ones += *(vec*)(p + j) = exp_of(load(p + j) - safe);
    // lse is rounded at its own size: without this, weights of large scores would miss the sum 1 by |lse| * 2^-24.
    const float sum = sum_of(ones), by = sum == 0.0f ? 1.0f : sum;
    vec total = {};
    for (i64 j = 0; j < n; j += W) {
        const vec e = load(p + j) / by, product = e * load(dp + j);
        *(vec*)(p + j) = e;
        *(vec*)(dp + j) = product;
        total += product;
    }
    const float delta = sum_of(total);  // eager's own order: with one visible key the difference below is exactly 0
    for (i64 j = 0; j < n; j += W) *(vec*)(dp + j) = load(dp + j) - load(p + j) * delta;
}

// P (with dropout) into p and dS into dp, for one row of n keys from `first` on.
void row_gradient(const Sequence& s, i64 i, float* p, float* dp, float* keep, i64 first, i64 n) {
    const Call& c = s.call;
    s.finish(i, p, first, n);
    if (c.dropout) {
        s.kept(i, keep, first, n);
        for (i64 j = 0; j < n; j++) dp[j] *= keep[j];
    }
    if (c.activations) {
        activate_row(c.activations[s.head], p, dp, n);
        if (c.post_scale != 1.0f)
            for (i64 j = 0; j < n; j += W) {
                *(vec*)(p + j) = load(p + j) * c.post_scale;
                *(vec*)(dp + j) = load(dp + j) * c.post_scale;
            }
    } else {
        softmax_gradient(s, i, p, dp, n);
    }
    if (c.dropout)
        for (i64 j = 0; j < n; j++) p[j] *= keep[j];
}

void add_bias_gradient(const Sequence& s, i64 i, const float* ds, i64 first, i64 n, float* dbias) {
    const Call& c = s.call;
    float* row = dbias + s.b * c.dbias_stride[0] + s.head * c.dbias_stride[1] + s.q_position(i) * c.dbias_stride[2];
    for (i64 j = 0; j < std::min(n, s.lk - first); j++) row[s.k_position(first + j) * c.dbias_stride[3]] += ds[j];
}

void write_rows(float* to, i64 row, const float* from, i64 ld, i64 n, i64 d, float scale) {
    for (i64 i = 0; i < n; i++)
        for (i64 x = 0; x < d; x++) to[i * row + x] = from[i * ld + x] * scale;
}

void backward_task(const Call& c, i64 b, i64 kv_head, float* dbias, Scratch& scratch) {
    Sequence s{c, b, 0, c.q_offsets[b], c.k_offsets[b], c.q_offsets[b + 1] - c.q_offsets[b],
               c.k_offsets[b + 1] - c.k_offsets[b], 0};
    s.shift = c.bottom_right ? s.lk - s.lq : 0;
    const i64 sharing = c.heads / c.kv_heads, ld = round_up(s.lk, W);
    const i64 dp_ = round_up(c.d, W), dvp = round_up(c.dv_size, W), block = block_rows(s.lk);
    scratch.reset((c.d + c.dv_size + 2 * block + 1) * ld + (2 * s.lk + block) * (dp_ + dvp) + block * dp_, 32);
    const float* k = c.k + s.k_start * c.k_stride[0] + kv_head * c.k_stride[1];
    const float* v = c.v + s.k_start * c.v_stride[0] + kv_head * c.v_stride[1];
    const float* kt = transposed(k, c.k_stride[0], s.lk, c.d, ld, scratch);
    const float* vt = transposed(v, c.v_stride[0], s.lk, c.dv_size, ld, scratch);
    const Rows keys = rows_of(k, c.k_stride[0], s.lk, c.d, scratch);
    float *p = scratch.take(block * ld), *ds = scratch.take(block * ld), *keep = scratch.take(ld);
    float *dk = scratch.take(s.lk * dp_), *dv = scratch.take(s.lk * dvp), *dq = scratch.take(block * dp_);
    std::fill(dk, dk + s.lk * dp_, 0.0f);
    std::fill(dv, dv + s.lk * dvp, 0.0f);
    const size_t mark = scratch.used;
    for (s.head = kv_head * sharing; s.head < (kv_head + 1) * sharing; s.head++) {
        const float* q = c.q + s.q_start * c.q_stride[0] + s.head * c.q_stride[1];
        const float* dout = c.dout + s.q_start * c.dout_stride[0] + s.head * c.dout_stride[1];
        for (i64 a = 0; a < s.lq; a += block) {
            const i64 rows = std::min(block, s.lq - a);
            scratch.used = mark;
            const Rows qs = rows_of(q + a * c.q_stride[0], c.q_stride[0], rows, c.d, scratch);
            const Rows dos = rows_of(dout + a * c.dout_stride[0], c.dout_stride[0], rows, c.dv_size, scratch);
            i64 first, n;
            span(s, a, a + rows, first, n);
            const i64 real = std::min(n, s.lk - first);
            product(rows, n, c.d, qs.p, qs.ld, 1, kt + first, ld, p, ld);
            product(rows, n, c.dv_size, dos.p, dos.ld, 1, vt + first, ld, ds, ld);
            for (i64 i = 0; i < rows; i++) {
                row_gradient(s, a + i, p + i * ld, ds + i * ld, keep, first, n);
                if (dbias) add_bias_gradient(s, a + i, ds + i * ld, first, n, dbias);
            }
            product(real, dvp, rows, p, 1, ld, dos.p, dos.ld, dv + first * dvp, dvp, true);
            product(real, dp_, rows, ds, 1, ld, qs.p, qs.ld, dk + first * dp_, dp_, true);
            product(rows, dp_, real, ds, ld, 1, keys.p + first * keys.ld, keys.ld, dq, dp_);
            float* to = c.dq + ((s.q_start + a) * c.heads + s.head) * c.d;
            write_rows(to, c.heads * c.d, dq, dp_, rows, c.d, c.scale);
        }
    }
    float* to = c.dk + (s.k_start * c.kv_heads + kv_head) * c.d;
    write_rows(to, c.kv_heads * c.d, dk, dp_, s.lk, c.d, c.scale);
    to = c.dv + (s.k_start * c.kv_heads + kv_head) * c.dv_size;
    write_rows(to, c.kv_heads * c.dv_size, dv, dvp, s.lk, c.dv_size, 1.0f);
}

}  // namespace

// Threads share the tasks of a Call through `next`, whoever brings them.
extern "C" void gemopt_forward(const Call* call, i64 threads) {
    on_threads(threads, [call] {
        static thread_local Scratch scratch;
        const i64 tasks = call->sequences * call->kv_heads;
        for (i64 t; (t = call->next->fetch_add(1)) < tasks;)
            forward_task(*call, call->order[t / call->kv_heads], t % call->kv_heads, scratch);
    });
}

// With a gradient of the bias, a thread takes a whole part (every parts-th sequence), whose sums have memory of their own.
extern "C" void gemopt_backward(const Call* call, i64 threads) {
    on_threads(threads, [call] {
        static thread_local Scratch scratch;
        if (!call->dbias) {
            const i64 tasks = call->sequences * call->kv_heads;
            for (i64 t; (t = call->next->fetch_add(1)) < tasks;)
                backward_task(*call, call->order[t / call->kv_heads], t % call->kv_heads, nullptr, scratch);
            return;
        }
        for (i64 part; (part = call->next->fetch_add(1)) < call->parts;)
            for (i64 t = part; t < call->sequences; t += call->parts)
                for (i64 head = 0; head < call->kv_heads; head++)
                    backward_task(*call, call->order[t], head, call->dbias + part * call->dbias_size, scratch);
    });
}

extern "C" int gemopt_has_threads() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
