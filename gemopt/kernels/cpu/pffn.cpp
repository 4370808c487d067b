// The personalised feed-forward block of packed sequences for the CPU, fp32, in one pass over its rows:
//
//     ln = LayerNorm(q)    g = post_scale act(scale ln K^T) V + ln    out = RMSNorm(g) + q
//
// One task is one sequence with all its heads, since the norms run over all of them; rows go through in blocks that stay in
// the cache. With hats for normalised rows and u, w, b for the weights of the norms, the gradients are
//
//     dg = (u dout - ghat mean(u dout ghat)) r     dP = post_scale dg V^T    dS = act'(S) dP    dV = post_scale P^T dg
//     dx = scale dS K + dg    dK = scale dS^T ln    dq = (w dx - mean(w dx) - qhat mean(w dx qhat)) rstd + dout
//     du = sum(dout ghat)     dw = sum(dx qhat)     db = sum(dx)
//
// FLOPs 4 H D sum(q_i k_i) forward, 2.5 times that backward; bytes: every tensor once.

#include <atomic>

#include "activations.h"
#include "vectors.h"

struct PffnCall {
    const float *q, *k, *v, *dout;         // q and dout [T, H D]; of k and v row and head strides below
    float *out, *ln, *stats, *g;           // [T, H D], stats [2, T]: mean, 1/deviation; the backward reads the last three
    float *dq, *dk, *dv;                   // contiguous
    const float *weight, *bias, *rms_weight;  // [H D] or null
    float *dweight, *dbias, *drms;         // [parts, H D], zeros, or null
    const i64 *q_offsets, *k_offsets;
    const int32_t* activations;
    const i64* order;  // sequences, in the order in which they are taken; the last one has the rows that belong to none
    std::atomic<i64>* next;
    i64 sequences, parts, rows, heads, kv_heads, d;
    i64 k_stride[2], v_stride[2];
    float scale, post_scale, eps, rms_eps;
};

namespace {

constexpr i64 BLOCK = 48;

float dot(const float* a, const float* b, i64 n) {
    vec total = {};
    i64 j = 0;
    for (; j + W <= n; j += W) total += load(a + j) * load(b + j);
    float sum = sum_of(total);
    for (; j < n; j++) sum += a[j] * b[j];
    return sum;
}

float sum(const float* a, i64 n) {
    vec total = {};
    i64 j = 0;
    for (; j + W <= n; j += W) total += load(a + j);
    float sum = sum_of(total);
    for (; j < n; j++) sum += a[j];
    return sum;
}

// One sequence: its rows of q, and its keys and values, by head.
struct Task {
    const PffnCall& c;
    i64 start, lq, k_start, lk, width, ld, dp;
    std::vector<const float*> kt, vt;
    std::vector<Rows> keys, values;

    Task(const PffnCall& c, i64 b) : c(c), width(c.heads * c.d), dp(round_up(c.d, W)) {
        const bool spare = b == c.sequences;  // rows after the last sequence have no keys
        start = c.q_offsets[b], lq = (spare ? c.rows : c.q_offsets[b + 1]) - start;
        k_start = spare ? 0 : c.k_offsets[b], lk = spare ? 0 : c.k_offsets[b + 1] - k_start;
        ld = round_up(lk, W);
    }

    void read(Scratch& scratch, bool backward) {
        for (i64 h = 0; h < c.kv_heads; h++) {
            const float* k = c.k + k_start * c.k_stride[0] + h * c.k_stride[1];
            const float* v = c.v + k_start * c.v_stride[0] + h * c.v_stride[1];
            kt.push_back(transposed(k, c.k_stride[0], lk, c.d, ld, scratch));
            if (backward) {
                vt.push_back(transposed(v, c.v_stride[0], lk, c.d, ld, scratch));
                keys.push_back(rows_of(k, c.k_stride[0], lk, c.d, scratch));
            } else {
                values.push_back(rows_of(v, c.v_stride[0], lk, c.d, scratch));
            }
        }
    }

    i64 kv_head(i64 h) const { return h / (c.heads / c.kv_heads); }

    // Scores of a block of rows and one head.
    void scores(const float* ln, i64 rows, i64 h, float* s) const {
        product(rows, ld, c.d, ln + h * c.d, width, 1, kt[kv_head(h)], ld, s, ld);
        for (i64 j = 0; j < rows * ld; j += W) *(vec*)(s + j) = load(s + j) * c.scale;
    }
};

// q - mean, twice: what rounding leaves of the mean would be divided by the deviation, which may be 0.
void centre(const float* q, float mean, i64 n, float* centred) {
    for (i64 x = 0; x < n; x++) centred[x] = q[x] - mean;
    const float rest = sum(centred, n) / n;
    for (i64 x = 0; x < n; x++) centred[x] -= rest;
}

void layer_norm(const PffnCall& c, i64 t, i64 n) {
    const float* q = c.q + t * n;
    float* ln = c.ln + t * n;
    const float mean = sum(q, n) / n;
    centre(q, mean, n, ln);
    const float rstd = 1.0f / std::sqrt(dot(ln, ln, n) / n + c.eps);
    c.stats[t] = mean, c.stats[c.rows + t] = rstd;
    for (i64 x = 0; x < n; x++) ln[x] *= rstd;
    if (c.weight)
        for (i64 x = 0; x < n; x++) ln[x] *= c.weight[x];
    if (c.bias)
        for (i64 x = 0; x < n; x++) ln[x] += c.bias[x];
}

float rms_scale(const PffnCall& c, const float* g, i64 n) { return 1.0f / std::sqrt(dot(g, g, n) / n + c.rms_eps); }

void forward_task(const PffnCall& c, i64 b, Scratch& scratch) {
    Task task(c, b);
    if (task.lq <= 0) return;
    const i64 n = task.width, ld = task.ld, dp = task.dp;
    scratch.reset(c.kv_heads * (c.d * ld + task.lk * dp) + BLOCK * (ld + dp), 2 * c.kv_heads + 8);
    task.read(scratch, false);
    float *s = scratch.take(BLOCK * ld), *result = scratch.take(BLOCK * dp);
    for (i64 a = task.start; a < task.start + task.lq; a += BLOCK) {
        const i64 rows = std::min(BLOCK, task.start + task.lq - a);
        for (i64 t = a; t < a + rows; t++) layer_norm(c, t, n);
        for (i64 h = 0; h < c.heads; h++) {
            task.scores(c.ln + a * n, rows, h, s);
            activate_row(c.activations[h], s, nullptr, rows * ld);
            const Rows& values = task.values[task.kv_head(h)];
            product(rows, dp, task.lk, s, ld, 1, values.p, values.ld, result, dp);
            for (i64 i = 0; i < rows; i++) {
                const float* ln = c.ln + (a + i) * n + h * c.d;
                float* g = c.g + (a + i) * n + h * c.d;
                for (i64 x = 0; x < c.d; x++) g[x] = result[i * dp + x] * c.post_scale + ln[x];
            }
        }
        for (i64 t = a; t < a + rows; t++) {
            const float *g = c.g + t * n, *q = c.q + t * n, r = rms_scale(c, g, n);
            float* out = c.out + t * n;
            if (c.rms_weight)
                for (i64 x = 0; x < n; x++) out[x] = g[x] * r * c.rms_weight[x] + q[x];
            else
                for (i64 x = 0; x < n; x++) out[x] = g[x] * r + q[x];
        }
    }
}

// dg of one row; `normed` is room for a row.
void rms_gradient(const PffnCall& c, i64 t, i64 n, float* dg, float* normed, float* drms) {
    const float *g = c.g + t * n, *dout = c.dout + t * n, r = rms_scale(c, g, n);
    for (i64 x = 0; x < n; x++) normed[x] = g[x] * r;
    for (i64 x = 0; x < n; x++) dg[x] = c.rms_weight ? dout[x] * c.rms_weight[x] : dout[x];
    if (drms)
        for (i64 x = 0; x < n; x++) drms[x] += dout[x] * normed[x];
    const float mean = dot(dg, normed, n) / n;
    for (i64 x = 0; x < n; x++) dg[x] = (dg[x] - normed[x] * mean) * r;
}

// dq of one row from dx, which is spoilt.
void layer_norm_gradient(const PffnCall& c, i64 t, i64 n, float* dx, float* normed, float* dweight, float* dbias) {
    const float mean = c.stats[t], rstd = c.stats[c.rows + t];
    const float* dout = c.dout + t * n;
    float* dq = c.dq + t * n;
    if (c.q) {
        centre(c.q + t * n, mean, n, normed);
        for (i64 x = 0; x < n; x++) normed[x] *= rstd;
    } else
        std::copy(c.ln + t * n, c.ln + (t + 1) * n, normed);
    if (dweight)
        for (i64 x = 0; x < n; x++) dweight[x] += dx[x] * normed[x];
    if (dbias)
        for (i64 x = 0; x < n; x++) dbias[x] += dx[x];
    if (c.weight)
        for (i64 x = 0; x < n; x++) dx[x] *= c.weight[x];
    const float all = sum(dx, n) / n, along = dot(dx, normed, n) / n;
    for (i64 x = 0; x < n; x++) dq[x] = (dx[x] - all - normed[x] * along) * rstd + dout[x];
}

void backward_task(const PffnCall& c, i64 b, i64 part, Scratch& scratch) {
    Task task(c, b);
    const i64 n = task.width, ld = task.ld, dp = task.dp, lk = task.lk;
    const i64 wide = round_up(n, W);
    scratch.reset(c.kv_heads * (2 * c.d * ld + 3 * lk * dp) + BLOCK * (2 * ld + 3 * dp + 2 * wide) + wide, 3 * c.kv_heads + 16);
    task.read(scratch, true);
    float *dk = scratch.take(c.kv_heads * lk * dp), *dv = scratch.take(c.kv_heads * lk * dp);
    std::fill(dk, dk + c.kv_heads * lk * dp, 0.0f);
    std::fill(dv, dv + c.kv_heads * lk * dp, 0.0f);
    float *p = scratch.take(BLOCK * ld), *ds = scratch.take(BLOCK * ld), *result = scratch.take(BLOCK * dp);
    float *dg = scratch.take(BLOCK * wide), *dx = scratch.take(BLOCK * wide), *normed = scratch.take(wide);
    const size_t mark = scratch.used;
    auto of_part = [&](float* sums) { return sums ? sums + part * n : nullptr; };
    for (i64 a = task.start; a < task.start + task.lq; a += BLOCK) {
        const i64 rows = std::min(BLOCK, task.start + task.lq - a);
        for (i64 i = 0; i < rows; i++) rms_gradient(c, a + i, n, dg + i * n, normed, of_part(c.drms));
        for (i64 h = 0; h < c.heads; h++) {
            const i64 kv = task.kv_head(h);
            const float* ln = c.ln + a * n;
            scratch.used = mark;
            task.scores(ln, rows, h, p);
            product(rows, ld, c.d, dg + h * c.d, n, 1, task.vt[kv], ld, ds, ld);
            activate_row(c.activations[h], p, ds, rows * ld);
            const Rows lns = rows_of(ln + h * c.d, n, rows, c.d, scratch), dgs = rows_of(dg + h * c.d, n, rows, c.d, scratch);
            product(lk, dp, rows, p, 1, ld, dgs.p, dgs.ld, dv + kv * lk * dp, dp, true);
            product(lk, dp, rows, ds, 1, ld, lns.p, lns.ld, dk + kv * lk * dp, dp, true);
            product(rows, dp, lk, ds, ld, 1, task.keys[kv].p, task.keys[kv].ld, result, dp);
            const float by = c.scale * c.post_scale;
            for (i64 i = 0; i < rows; i++)
                for (i64 x = 0; x < c.d; x++)
                    dx[i * n + h * c.d + x] = result[i * dp + x] * by + dg[i * n + h * c.d + x];
        }
        for (i64 i = 0; i < rows; i++)
            layer_norm_gradient(c, a + i, n, dx + i * n, normed, of_part(c.dweight), of_part(c.dbias));
    }
    for (i64 h = 0; h < c.kv_heads; h++)
        for (i64 j = 0; j < lk; j++) {
            const i64 to = ((task.k_start + j) * c.kv_heads + h) * c.d, from = (h * lk + j) * dp;
            for (i64 x = 0; x < c.d; x++) c.dk[to + x] = dk[from + x] * c.scale * c.post_scale;
            for (i64 x = 0; x < c.d; x++) c.dv[to + x] = dv[from + x] * c.post_scale;
        }
}

}  // namespace

// Threads share the tasks of a PffnCall through `next`, whoever brings them.
extern "C" void gemopt_pffn_forward(const PffnCall* call, i64 threads) {
    on_threads(threads, [call] {
        static thread_local Scratch scratch;
        for (i64 t; (t = call->next->fetch_add(1)) <= call->sequences;) forward_task(*call, call->order[t], scratch);
    });
}

// With gradients of weights, a thread takes a whole part (every parts-th sequence), whose sums have memory of their own.
extern "C" void gemopt_pffn_backward(const PffnCall* call, i64 threads) {
    on_threads(threads, [call] {
        static thread_local Scratch scratch;
        if (!call->dweight && !call->dbias && !call->drms) {
            for (i64 t; (t = call->next->fetch_add(1)) <= call->sequences;) backward_task(*call, call->order[t], 0, scratch);
            return;
        }
        for (i64 part; (part = call->next->fetch_add(1)) < call->parts;)
            for (i64 t = part; t <= call->sequences; t += call->parts) backward_task(*call, call->order[t], part, scratch);
    });
}
