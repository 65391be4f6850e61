//! Attention within one sequence, in blocks of queries.

use super::kernels::{self, Input, Isa, PANEL, Rows, Store};
use super::{Buffer, Precision};

/// Queries whose scores are held at once: memory for a sequence of n tokens is `QUERIES x n` floats, never n x n.
const QUERIES: usize = 48;

/// Heads of an attention layer. Query heads share key and value heads in groups of `heads / kv_heads`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Floats of a head.
    pub head_dim: usize,
    /// What scores are multiplied by before the softmax.
    pub scale: f32,
    /// Tokens that a token sees back to, itself included; none is all.
    pub window: Option<usize>,
    /// Whether a token sees those before it and itself alone; else all see all, and there is no window.
    pub causal: bool,
    /// That of the model: in a rounded one, attention runs on the tile unit where there is one, to 16 bits, else in f32.
    pub precision: Precision,
}

impl AttentionShape {
    /// Floats of a row that holds queries, keys and values.
    #[must_use]
    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Floats of a row that holds keys and values.
    #[must_use]
    pub fn kv(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }
}

/// Buffers of [`attention`].
#[derive(Debug, Default)]
pub struct AttentionScratch {
    keys: Buffer,
    values: Buffer,
    scores: Buffer,
    #[cfg(target_arch = "x86_64")]
    tiles: super::amx::AttentionScratch,
}

/// Attends each token of one sequence to the tokens that it sees.
///
/// `qkv` holds a row of queries, keys and values per token ([`AttentionShape::qkv`] floats); `out` gets `heads x head_dim` floats a row. `past` holds the
/// keys and values ([`AttentionShape::kv`]) of the tokens before them in a causal sequence: the rows of `out` are those of the whole sequence, bit for bit.
pub fn attention(shape: AttentionShape, past: &[f32], qkv: &[f32], out: &mut [f32], scratch: &mut AttentionScratch) {
    #[cfg(target_arch = "x86_64")]
    if shape.precision != Precision::F32 && shape.causal && super::amx::available() {
        return super::amx::attention(shape, past, qkv, out, &mut scratch.tiles);
    }
    let isa = Isa::best();
    let AttentionShape { heads, kv_heads, head_dim, scale, window, causal, .. } = shape;
    let (row, group, width) = (shape.qkv(), heads / kv_heads, heads * head_dim);
    let before_all = past.len() / shape.kv();
    let tokens = before_all + qkv.len() / row;
    let key_panels = tokens.div_ceil(PANEL);
    let value_panels = head_dim.div_ceil(PANEL);
    let keys = scratch.keys.get(key_panels * PANEL * head_dim);
    let values = scratch.values.get(value_panels * PANEL * tokens);
    let scores = scratch.scores.get(QUERIES.min(tokens) * tokens);

    for kv in 0..kv_heads {
        let (key_at, value_at) = (kv * head_dim, (kv_heads + kv) * head_dim);
        let rows = past.chunks_exact(shape.kv()).chain(qkv.chunks_exact(row).map(|row| &row[heads * head_dim..]));
        for (t, row) in rows.enumerate() {
            let panel = &mut keys[(t / PANEL) * PANEL * head_dim..];
            for (i, v) in row[key_at..key_at + head_dim].iter().enumerate() {
                panel[i * PANEL + t % PANEL] = *v;
            }
            for (p, part) in row[value_at..value_at + head_dim].chunks(PANEL).enumerate() {
                let at = p * PANEL * tokens + t * PANEL;
                values[at..at + part.len()].copy_from_slice(part);
                values[at + part.len()..at + PANEL].fill(0.0);
            }
        }
        for head in kv * group..(kv + 1) * group {
            for first in (before_all..tokens).step_by(QUERIES) {
                let rows = QUERIES.min(tokens - first);
                let before = |query: usize| window.map_or(0, |window| (query + 1).saturating_sub(window));
                // Keys from the panel in which the first query's window begins.
                let start = before(first) / PANEL * PANEL;
                let seen = if causal { first + rows } else { tokens } - start;
                let data = &qkv[(first - before_all) * row + head * head_dim..];
                let queries = Input::Plain(Rows { data, rows, width: head_dim, stride: row });
                kernels::product(isa, queries, &keys[start * head_dim..], seen, scores, seen, Store::Set);
                for (query, scores) in (first..).zip(scores.chunks_exact_mut(seen).take(rows)) {
                    let (hidden, scores) = scores.split_at_mut(before(query) - start);
                    hidden.fill(0.0);
                    kernels::softmax(isa, scores, if causal { query + 1 } else { tokens } - before(query), scale);
                }
                // The values of a head are `seen` rows deep: each panel is cut to them.
                for p in 0..value_panels {
                    let panel = &values[(p * tokens + start) * PANEL..][..PANEL * seen];
                    let columns = (head_dim - p * PANEL).min(PANEL);
                    let target = &mut out[(first - before_all) * width + head * head_dim + p * PANEL..];
                    let weights = Input::Plain(Rows { data: &scores[..], rows, width: seen, stride: seen });
                    kernels::product(isa, weights, panel, columns, target, width, Store::Set);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition_for_every_length_and_window_and_ignores_what_follows() {
        for window in [None, Some(1), Some(7), Some(48), Some(60), Some(200)] {
            for (precision, off) in [(Precision::F32, 1e-5), (Precision::Bf16, 1e-4)] {
                check(AttentionShape { heads: 4, kv_heads: 2, head_dim: 40, scale: 0.2, window, causal: true, precision }, off);
            }
        }
        let shape =
            AttentionShape { heads: 4, kv_heads: 2, head_dim: 40, scale: 0.2, window: None, causal: false, precision: Precision::F32 };
        check(shape, 1e-5);
    }

    fn check(shape: AttentionShape, off: f64) {
        let row = shape.qkv();
        let tokens = 117;
        let qkv: Vec<f32> = (0..tokens * row).map(|i| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 3.0).collect();
        let mut scratch = AttentionScratch::default();
        let mut whole = vec![0.0; tokens * 160];
        attention(shape, &[], &qkv, &mut whole, &mut scratch);
        for t in [0, 1, 31, 47, 48, 95, 116] {
            for head in 0..4 {
                let q = &qkv[t * row + head * 40..][..40];
                let at = |j: usize, from: usize| &qkv[j * row + from..][..40];
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
                let from = shape.window.map_or(0, |w| (t + 1).saturating_sub(w));
                let to = if shape.causal { t } else { tokens - 1 };
                let raw: Vec<f64> = (from..=to).map(|j| dot(q, at(j, (4 + head / 2) * 40)) * 0.2).collect();
                let top = raw.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = raw.iter().map(|s| (s - top).exp()).sum();
                for i in 0..40 {
                    let exact: f64 =
                        (from..=to).map(|j| (raw[j - from] - top).exp() / sum * f64::from(at(j, (6 + head / 2) * 40)[i])).sum();
                    assert!((f64::from(whole[t * 160 + head * 40 + i]) - exact).abs() < off);
                }
            }
        }
        if !shape.causal {
            return;
        }
        // A shorter sequence has the same bits: what comes later is never seen.
        for short in [1, 20, 50, 100] {
            let mut out = vec![0.0; short * 160];
            attention(shape, &[], &qkv[..short * row], &mut out, &mut scratch);
            assert_eq!(out, whole[..short * 160]);
            // And so have the tokens after it, from its keys and values alone.
            let past: Vec<f32> = qkv[..short * row].chunks_exact(row).flat_map(|row| row[160..].to_vec()).collect();
            let mut rest = vec![0.0; (tokens - short) * 160];
            attention(shape, &past, &qkv[short * row..], &mut rest, &mut scratch);
            assert_eq!(rest, whole[short * 160..]);
        }
    }
}
