//! What each operation of the model means: plain, slow definitions, the oracle of the CPU and CUDA kernels.
//!
//! Inputs and outputs are f32; sums are kept in f64, so that what a kernel differs by is the kernel's own rounding. One
//! token at a time, row-major slices, no blocking. Source of all formulas: openai/gpt-oss `gpt_oss/torch/model.py`.

use crate::config::SWIGLU_ALPHA;

/// `y[o] = b[o] + sum_i x[i] * w[o, i]`. `weight`: `[out, in]`; `bias`: `[out]`.
///
/// # Panics
/// If the lengths disagree.
#[must_use]
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    assert!(weight.len().is_multiple_of(x.len()), "weight is [out, {}]", x.len());
    let rows = weight.chunks_exact(x.len());
    if let Some(bias) = bias {
        assert_eq!(bias.len(), rows.len(), "one bias an output");
    }
    rows.enumerate().map(|(o, row)| (dot(x, row) + bias.map_or(0.0, |bias| f64::from(bias[o]))) as f32).collect()
}

/// `y[h] = x[h] * (mean_h(x[h]^2) + eps)^-1/2 * w[h]` (`RMSNorm`). `x`, `weight`: `[hidden]`.
///
/// # Panics
/// If the lengths disagree.
#[must_use]
pub fn rmsnorm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    assert_eq!(x.len(), weight.len(), "one weight a channel");
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32).collect()
}

/// Turns one head in place (`_apply_rotary_emb`): channel `i` of the first half pairs with channel `i` of the second.
/// `head`: `[head_dim]`; `cos`, `sin`: `[head_dim / 2]` of the position, from [`crate::rope::RopeAngles`].
///
/// # Panics
/// If the lengths disagree.
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert!(head.len() == 2 * cos.len() && cos.len() == sin.len(), "cos and sin hold head_dim / 2");
    let (first, second) = head.split_at_mut(cos.len());
    for i in 0..cos.len() {
        let (a, b) = (first[i], second[i]);
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
    }
}

/// Heads of one attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `num_kv_heads`. Query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Keys that the query may see, its own included; `None` for all.
    pub window: Option<usize>,
}

/// Attention of the last of `n` positions over all of them (`sdpa`), after rope. A learned logit for each head, the
/// sink, takes part in the softmax and is then dropped; it is neither scaled nor rotated:
/// ```text
/// s_j = q . k_j / sqrt(head_dim)        for the visible j: 0 <= n - 1 - j < window
/// out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))
/// ```
/// `query`: `[num_heads, head_dim]`; `keys`, `values`: `[n, num_kv_heads, head_dim]`; `sinks`: `[num_heads]`;
/// result: `[num_heads, head_dim]`.
///
/// # Panics
/// If the lengths disagree, or there is no key.
#[must_use]
pub fn attention(query: &[f32], keys: &[f32], values: &[f32], sinks: &[f32], shape: AttentionShape) -> Vec<f32> {
    let AttentionShape { num_heads, num_kv_heads, head_dim, window } = shape;
    let kv_width = num_kv_heads * head_dim;
    assert_eq!(query.len(), num_heads * head_dim, "query is [num_heads, head_dim]");
    assert_eq!(sinks.len(), num_heads, "one sink a head");
    assert!(keys.len() == values.len() && keys.len().is_multiple_of(kv_width), "keys are [n, num_kv_heads, head_dim]");
    let num_keys = keys.len() / kv_width;
    assert!(num_keys > 0, "a query sees at least itself");
    let visible = num_keys - window.unwrap_or(num_keys).min(num_keys)..num_keys;

    let mut out = vec![0.0; query.len()];
    for head in 0..num_heads {
        let kv_head = head / (num_heads / num_kv_heads);
        let of_position = |j: usize| j * kv_width + kv_head * head_dim..j * kv_width + (kv_head + 1) * head_dim;
        let head_query = &query[head * head_dim..(head + 1) * head_dim];
        let scores: Vec<f64> =
            visible.clone().map(|j| dot(head_query, &keys[of_position(j)]) / (head_dim as f64).sqrt()).collect();

        let sink = f64::from(sinks[head]);
        let max = scores.iter().copied().fold(sink, f64::max);
        let sum = scores.iter().map(|score| (score - max).exp()).sum::<f64>() + (sink - max).exp();
        let mut head_out = vec![0.0; head_dim];
        for (j, score) in visible.clone().zip(&scores) {
            let weight = (score - max).exp() / sum;
            for (out, &value) in head_out.iter_mut().zip(&values[of_position(j)]) {
                *out += weight * f64::from(value);
            }
        }
        for (out, value) in out[head * head_dim..].iter_mut().zip(head_out) {
            *out = value as f32;
        }
    }
    out
}

/// One of the experts that a token visits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed {
    /// The expert.
    pub expert: usize,
    /// Its share; the shares of a token sum to 1.
    pub weight: f32,
}

/// Chooses the `k` largest logits, the lowest index among equals, and takes the softmax over those alone. Largest
/// first. (The reference leaves ties to `torch.topk`, which promises no order.) `logits`: `[experts]`.
///
/// # Panics
/// If there are fewer than `k` logits or one is NaN.
#[must_use]
pub fn route(logits: &[f32], k: usize) -> Vec<Routed> {
    assert!(k <= logits.len(), "{k} of {} experts", logits.len());
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable: equal logits stay in index order.
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("router logits are not NaN"));
    order.truncate(k);
    let max = f64::from(logits[order[0]]);
    let exp = |expert: usize| (f64::from(logits[expert]) - max).exp();
    let sum: f64 = order.iter().map(|&expert| exp(expert)).sum();
    order.into_iter().map(|expert| Routed { expert, weight: (exp(expert) / sum) as f32 }).collect()
}

/// The clamped SwiGLU (`swiglu`): the gate has no lower clamp, and the linear half gets 1 added.
/// ```text
/// gate = min(x[2 i], limit)      up = clamp(x[2 i + 1], -limit, limit)      y[i] = gate * sigmoid(1.702 gate) * (up + 1)
/// ```
/// `gate_up`: `[2 units]`, gate and up in turn; result: `[units]`.
#[must_use]
pub fn swiglu(gate_up: &[f32], limit: f32) -> Vec<f32> {
    let unit = |pair: &[f32]| {
        let gate = f64::from(pair[0].min(limit));
        let up = f64::from(pair[1].clamp(-limit, limit));
        (gate / (1.0 + (-f64::from(SWIGLU_ALPHA) * gate).exp()) * (up + 1.0)) as f32
    };
    gate_up.chunks_exact(2).map(unit).collect()
}

/// One expert's matrices as f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Expert {
    /// `[2 units, hidden]`, gate and up rows in turn.
    pub gate_up: Vec<f32>,
    /// `[2 units]`
    pub gate_up_bias: Vec<f32>,
    /// `[hidden, units]`
    pub down: Vec<f32>,
    /// `[hidden]`
    pub down_bias: Vec<f32>,
}

/// The mixture of experts (`MLPBlock` after the router): `y = sum_k w_k * (W2_k swiglu(W1_k x + b1_k) + b2_k)`.
/// `x`, result: `[hidden]`; `experts`: all experts of the layer.
///
/// # Panics
/// If the lengths disagree or an expert does not exist.
#[must_use]
pub fn moe(x: &[f32], routed: &[Routed], experts: &[Expert], limit: f32) -> Vec<f32> {
    let mut sum = vec![0.0f64; x.len()];
    for &Routed { expert, weight } in routed {
        let expert = &experts[expert];
        let activated = swiglu(&linear(x, &expert.gate_up, Some(&expert.gate_up_bias)), limit);
        let y = linear(&activated, &expert.down, Some(&expert.down_bias));
        for (sum, y) in sum.iter_mut().zip(y) {
            *sum += f64::from(weight) * f64::from(y);
        }
    }
    sum.into_iter().map(|value| value as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "both sides of a product are equally long");
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests;
