//! The gated delta rule of linear attention layers, with the short convolution before it.

use super::Buffer;
use super::kernels::{self, Activation, Isa};

/// Sizes of a gated delta layer. Value heads share key heads in groups of `value_heads / key_heads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Numbers of a query or key head.
    pub key_dim: usize,
    /// Numbers of a value head.
    pub value_dim: usize,
}

impl DeltaShape {
    /// Numbers of a row of queries, keys and values.
    #[must_use]
    pub fn qkv(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Numbers of a row of values.
    #[must_use]
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// A causal convolution along the sequence, each feature by itself.
#[derive(Debug)]
pub struct ShortConvolution {
    features: usize,
    /// One run of `features` weights per step back in time, the farthest first.
    weights: Vec<f32>,
}

impl ShortConvolution {
    /// Takes weights of shape `features x kernel`, the oldest token's first.
    #[must_use]
    pub fn new(features: usize, weights: &[f32]) -> Self {
        let kernel = weights.len() / features.max(1);
        let weights = (0..kernel).flat_map(|j| weights[j..].iter().step_by(kernel)).copied().collect();
        Self { features, weights }
    }

    /// Rows that the convolution looks back.
    #[must_use]
    pub fn reach(&self) -> usize {
        (self.weights.len() / self.features.max(1)).saturating_sub(1)
    }

    /// Convolves one sequence in place (rows of features) and passes it through SiLU. `past` holds the rows before the first, as they came in, as far as
    /// there are any within reach.
    pub fn forward(&self, past: &[f32], rows: &mut [f32], scratch: &mut Buffer) {
        let isa = Isa::best();
        let n = self.features;
        let before = past.len() / n;
        let out = scratch.get(n);
        // From the end, so that each row still finds the ones before it untouched.
        for t in (0..rows.len() / n).rev() {
            out.fill(0.0);
            for (back, weights) in self.weights.chunks_exact(n).rev().enumerate().rev() {
                if let Some(from) = t.checked_sub(back) {
                    kernels::multiply_add(isa, &rows[from * n..][..n], weights, out);
                } else if let Some(from) = (before + t).checked_sub(back) {
                    kernels::multiply_add(isa, &past[from * n..][..n], weights, out);
                }
            }
            kernels::activate(isa, Activation::Silu, out);
            rows[t * n..][..n].copy_from_slice(out);
        }
    }
}

/// Buffers of [`gated_delta`].
#[derive(Debug, Default)]
pub struct DeltaScratch {
    delta: Buffer,
    /// For the convolution before it.
    pub convolution: Buffer,
}

/// Runs the rule over one sequence, from the state that `state` holds (an empty one where it is empty), and leaves the state there.
///
/// `qkv` holds a row of queries, keys and values per token ([`DeltaShape::qkv`]); `decay` (the logarithm of what the state is multiplied
/// by, at most 0) and `beta` (the step, in 0..1) a number per token and value head; `out` gets [`DeltaShape::values`] numbers a row.
/// Queries and keys are normalised to length 1, queries divided by the root of their size.
pub fn gated_delta(
    shape: DeltaShape,
    qkv: &mut [f32],
    decay: &[f32],
    beta: &[f32],
    out: &mut [f32],
    state: &mut Vec<f32>,
    scratch: &mut DeltaScratch,
) {
    let isa = Isa::best();
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = shape;
    let keys = key_heads * key_dim;
    state.resize(value_heads * key_dim * value_dim, 0.0);
    let delta = scratch.delta.get(value_dim);
    let steps = qkv.chunks_exact_mut(shape.qkv()).zip(out.chunks_exact_mut(shape.values()));
    for ((row, out), (decay, beta)) in steps.zip(decay.chunks_exact(value_heads).zip(beta.chunks_exact(value_heads))) {
        let (heads, values) = row.split_at_mut(2 * keys);
        for (i, head) in heads.chunks_exact_mut(key_dim).enumerate() {
            let scale = if i < key_heads { 1.0 / (key_dim as f32).sqrt() } else { 1.0 };
            let scale = scale / (kernels::dot(isa, head, head) + 1e-6).sqrt();
            head.iter_mut().for_each(|v| *v *= scale);
        }
        let (queries, keys) = heads.split_at(keys);
        for (h, state) in state.chunks_exact_mut(key_dim * value_dim).enumerate() {
            let key = h * key_heads / value_heads * key_dim;
            let (q, k) = (&queries[key..key + key_dim], &keys[key..key + key_dim]);
            let (v, out) = (&values[h * value_dim..][..value_dim], &mut out[h * value_dim..][..value_dim]);
            kernels::delta_step(isa, state, q, k, v, decay[h].exp(), beta[h], delta, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ops::kernels::floats;

    #[test]
    fn convolution_looks_back_and_no_further() {
        let convolution = ShortConvolution::new(2, &[1.0, 10.0, 100.0, 2.0, 20.0, 200.0]);
        let mut rows = vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mut rest = rows[4..].to_vec();
        convolution.forward(&rows[..4], &mut rest, &mut Buffer::default());
        convolution.forward(&[], &mut rows, &mut Buffer::default());
        assert_eq!(rest, rows[4..], "after rows that are kept as if they were there");
        let silu = |x: f32| x / (1.0 + (-x).exp());
        for (found, plain) in rows.iter().zip([100.0, 200.0, 10.0, 20.0, 1.0, 2.0, 0.0, 0.0]) {
            assert!((found - silu(plain)).abs() < 1e-4);
        }
    }

    #[test]
    fn the_rule_writes_what_the_state_does_not_know() {
        let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 7 };
        let tokens = 9;
        let qkv = floats(tokens * shape.qkv(), 1);
        let decay: Vec<f32> = floats(tokens * 4, 2).iter().map(|v| -v.abs()).collect();
        let beta: Vec<f32> = floats(tokens * 4, 3).iter().map(|v| v.abs()).collect();
        let mut out = vec![0.0; tokens * shape.values()];
        let scratch = &mut DeltaScratch::default();
        gated_delta(shape, &mut qkv.clone(), &decay, &beta, &mut out, &mut Vec::new(), scratch);
        // In two parts, the state kept between them.
        let (mut parts, mut state) = (vec![0.0; tokens * shape.values()], Vec::new());
        let (first, second) = parts.split_at_mut(4 * shape.values());
        gated_delta(shape, &mut qkv[..4 * shape.qkv()].to_vec(), &decay[..16], &beta[..16], first, &mut state, scratch);
        gated_delta(shape, &mut qkv[4 * shape.qkv()..].to_vec(), &decay[16..], &beta[16..], second, &mut state, scratch);
        assert_eq!(parts, out);
        for h in 0..4 {
            let mut state = [[0.0_f64; 7]; 5];
            for t in 0..tokens {
                let row = &qkv[t * shape.qkv()..];
                let unit = |from: usize| -> Vec<f64> {
                    let head: Vec<f64> = row[from..from + 5].iter().map(|v| f64::from(*v)).collect();
                    let norm = (head.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                    head.iter().map(|v| v / norm).collect()
                };
                let (q, k) = (unit(h / 2 * 5), unit(10 + h / 2 * 5));
                state.iter_mut().flatten().for_each(|s| *s *= f64::from(decay[t * 4 + h]).exp());
                for v in 0..7 {
                    let known: f64 = (0..5).map(|i| state[i][v] * k[i]).sum();
                    let step = (f64::from(row[20 + h * 7 + v]) - known) * f64::from(beta[t * 4 + h]);
                    (0..5).for_each(|i| state[i][v] += k[i] * step);
                    let read: f64 = (0..5).map(|i| state[i][v] * q[i]).sum::<f64>() / 5.0_f64.sqrt();
                    assert!((read - f64::from(out[(t * 4 + h) * 7 + v])).abs() < 1e-5);
                }
            }
        }
    }
}
