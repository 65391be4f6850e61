//! The output head: log-probabilities of tokens and divergences of distributions, without a row of logits being held whole.

use super::kernels::{self, Isa};
use super::{Buffer, Linear, Numbers, Output, Part, device};
use crate::model::ModelError;

/// Tokens of the vocabulary whose logits are computed at once: for [`ROWS`] rows they fit the second-level cache.
const COLUMNS: usize = 2048;
/// Rows that go through the vocabulary together.
const ROWS: usize = 192;

/// The output head of a causal language model: `logits = E h`, capped to `cap * tanh(logits / cap)` where a cap is given.
#[derive(Debug)]
pub struct Head {
    hidden: usize,
    vocab: usize,
    /// The vocabulary in blocks of [`COLUMNS`].
    blocks: Vec<Linear>,
    cap: Option<f32>,
}

/// Buffers of [`Head`].
#[derive(Debug, Default)]
pub struct HeadScratch {
    logits: Buffer,
    others: Buffer,
}

/// Largest logit so far, the sum of `e^(logit - largest)`, and a sum weighted by the same terms.
#[derive(Debug, Clone, Copy)]
struct Running {
    top: f32,
    sum: f64,
    weighted: f64,
}

impl Running {
    const START: Self = Self { top: f32::NEG_INFINITY, sum: 0.0, weighted: 0.0 };

    fn add(&mut self, top: f32, sum: f64, weighted: f64) {
        let new = self.top.max(top);
        let (old_scale, scale) = (f64::from(self.top - new).exp(), f64::from(top - new).exp());
        *self = Self { top: new, sum: self.sum * old_scale + sum * scale, weighted: self.weighted * old_scale + weighted * scale };
    }

    /// The logarithm of the sum of exponentials.
    fn log(&self) -> f64 {
        f64::from(self.top) + self.sum.ln()
    }
}

impl Head {
    /// Packs weights of shape `vocab x hidden`.
    ///
    /// # Errors
    /// [`ModelError::Shape`] if they are not whole rows.
    pub fn pack(hidden: usize, weights: &Numbers, cap: Option<f32>) -> Result<Self, ModelError> {
        let block = |start: usize| {
            let range = start..(start + COLUMNS * hidden.max(1)).min(weights.len());
            Linear::pack_parts(hidden, &[Part { numbers: weights, range }], None, device::precision())
        };
        let blocks = (0..weights.len()).step_by(COLUMNS * hidden.max(1)).map(block).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { hidden, vocab: weights.len() / hidden.max(1), blocks, cap })
    }

    /// Whether [`Self::read`] can give these weights back, if it was packed of them.
    pub(super) fn keeps(&self, weights: &Numbers) -> bool {
        self.blocks.iter().all(|block| block.keeps(weights))
    }

    /// The weights of a token, from number `start` on, as they were before packing; see [`Self::keeps`].
    pub(super) fn read(&self, token: usize, start: usize, out: &mut [f32]) {
        self.blocks[token / COLUMNS].read(token % COLUMNS, start, out);
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Logits of rows of final-normed states (`rows x hidden` in, `rows x vocab` out).
    ///
    /// # Errors
    /// [`ModelError::Device`] if an accelerator fails.
    pub fn logits(&self, states: &[f32], out: &mut [f32], scratch: &mut HeadScratch) -> Result<(), ModelError> {
        let rows = states.len() / self.hidden;
        for (first, block) in (0..).step_by(COLUMNS).zip(&self.blocks) {
            let logits = self.block(block, states, &mut scratch.logits, rows)?;
            for (logits, out) in logits.chunks_exact(block.outputs()).zip(out.chunks_exact_mut(self.vocab)) {
                out[first..first + logits.len()].copy_from_slice(logits);
            }
        }
        Ok(())
    }

    fn block<'a>(&self, block: &Linear, states: &[f32], buffer: &'a mut Buffer, rows: usize) -> Result<&'a [f32], ModelError> {
        let logits = buffer.get(rows * block.outputs());
        block.forward(states, logits, Output::Set)?;
        if let Some(cap) = self.cap {
            kernels::soft_cap(Isa::best(), logits, cap);
        }
        Ok(logits)
    }

    /// The log-probability of one token after each row of final-normed states: `log softmax(logits)[target]`, in nats.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] for a target outside the vocabulary, [`ModelError::Device`] if an accelerator fails.
    pub fn log_probabilities(&self, states: &[f32], targets: &[u32], scratch: &mut HeadScratch) -> Result<Vec<f64>, ModelError> {
        if let Some(&id) = targets.iter().find(|&&t| t as usize >= self.vocab) {
            return Err(ModelError::TokenId { id, vocab: self.vocab });
        }
        let isa = Isa::best();
        let mut out = Vec::with_capacity(targets.len());
        for (states, targets) in states.chunks(ROWS * self.hidden).zip(targets.chunks(ROWS)) {
            let mut running = vec![Running::START; targets.len()];
            let mut observed = vec![0.0_f32; targets.len()];
            for (first, block) in (0..).step_by(COLUMNS).zip(&self.blocks) {
                let logits = self.block(block, states, &mut scratch.logits, targets.len())?;
                let rows = logits.chunks_exact(block.outputs()).zip(targets).zip(running.iter_mut().zip(&mut observed));
                for ((logits, &target), (running, observed)) in rows {
                    let top = kernels::largest(isa, logits);
                    running.add(top, f64::from(kernels::sum_exp(isa, logits, top)), 0.0);
                    if let Some(logit) = (target as usize).checked_sub(first).and_then(|i| logits.get(i)) {
                        *observed = *logit;
                    }
                }
            }
            out.extend(running.iter().zip(&observed).map(|(r, &o)| f64::from(o) - r.log()));
        }
        Ok(out)
    }

    /// KL(p || q) in nats for each pair of rows of final-normed states, p from `full` and q from `reset`, over the whole vocabulary.
    ///
    /// # Errors
    /// [`ModelError::Device`] if an accelerator fails.
    pub fn divergences(&self, full: &[f32], reset: &[f32], scratch: &mut HeadScratch) -> Result<Vec<f64>, ModelError> {
        let isa = Isa::best();
        let mut out = Vec::with_capacity(full.len() / self.hidden);
        for (full, reset) in full.chunks(ROWS * self.hidden).zip(reset.chunks(ROWS * self.hidden)) {
            let rows = full.len() / self.hidden;
            let mut running = vec![[Running::START; 2]; rows];
            for block in &self.blocks {
                let p = self.block(block, full, &mut scratch.logits, rows)?;
                let q = self.block(block, reset, &mut scratch.others, rows)?;
                for ((p, q), running) in p.chunks_exact(block.outputs()).zip(q.chunks_exact(block.outputs())).zip(&mut running) {
                    let (top, other) = (kernels::largest(isa, p), kernels::largest(isa, q));
                    let (sum, weighted) = kernels::sum_exp_weighted(isa, p, q, top);
                    running[0].add(top, f64::from(sum), f64::from(weighted));
                    running[1].add(other, f64::from(kernels::sum_exp(isa, q, other)), 0.0);
                }
            }
            // sum p (log p - log q) = sum p (logit_p - logit_q) - log Z_p + log Z_q
            out.extend(running.iter().map(|[p, q]| p.weighted / p.sum - p.log() + q.log()));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::ops::kernels::floats;
    use crate::model::ops::{Embedding, Precision, placed};

    #[test]
    fn embeddings_are_read_of_the_head_where_it_keeps_them() {
        let (hidden, vocab) = (77, COLUMNS + 77);
        let bf16: Vec<_> = floats(vocab * hidden, 3).into_iter().map(half::bf16::from_f32).collect();
        let all = [Numbers::Bf16(bf16.clone()), bf16.iter().map(|v| v.to_f32()).collect::<Vec<_>>().into()];
        let ids: Vec<u32> = (0..vocab as u32).rev().step_by(7).collect();
        for (numbers, precision) in all.iter().flat_map(|n| [Precision::F32, Precision::Bf16, Precision::Int8].map(|p| (n, p))) {
            let head = Arc::new(placed(None, precision, || Head::pack(hidden, numbers, None)).unwrap());
            assert_eq!(head.keeps(numbers), precision == Precision::Bf16 && matches!(numbers, Numbers::Bf16(_)));
            let (tied, own) = (Embedding::tied(hidden, numbers.clone(), &head).scaled(3.0), Embedding::new(hidden, numbers.clone()));
            let (mut found, mut expected) = (vec![0.0; ids.len() * hidden], vec![0.0; ids.len() * hidden]);
            tied.forward(&ids, &mut found).unwrap();
            own.forward(&ids, &mut expected).unwrap();
            assert!(found.iter().zip(&expected).all(|(a, b)| *a == 3.0 * b), "{precision:?}");
            tied.forward_part(&ids, 33, &mut found[..ids.len() * 9]).unwrap();
            assert!((0..9).all(|i| found[9 * 5 + i] == 3.0 * expected[5 * hidden + 33 + i]));
            assert!(matches!(tied.forward(&[vocab as u32], &mut found[..hidden]), Err(ModelError::TokenId { .. })));
        }
        // What multiplies elsewhere keeps them as well.
        let weights = super::super::bf16::Weights::pack(hidden, vocab, &|row, out| {
            all[0].read(row * hidden, out);
            true
        });
        let (mut found, mut expected) = (vec![0.0; hidden], vec![0.0; hidden]);
        for token in [0, 47, 48, vocab - 1] {
            weights.read(token, 0, &mut found);
            all[0].read(token * hidden, &mut expected);
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn probabilities_and_divergences_match_f64_across_blocks_and_rows() {
        let (hidden, vocab, rows) = (24, COLUMNS + 77, ROWS + 5);
        let weights: Vec<f32> = floats(vocab * hidden, 3).iter().map(|v| v * 2.0).collect();
        let (full, reset) = (floats(rows * hidden, 4), floats(rows * hidden, 5));
        let targets: Vec<u32> = (0..rows).map(|r| (r * 7919 % vocab) as u32).collect();
        for cap in [None, Some(2.5)] {
            let head = Head::pack(hidden, &weights.clone().into(), cap).unwrap();
            let mut scratch = HeadScratch::default();
            let found = head.log_probabilities(&full, &targets, &mut scratch).unwrap();
            let kl = head.divergences(&full, &reset, &mut scratch).unwrap();
            let log_softmax = |state: &[f32]| -> Vec<f64> {
                let logit = |w: &[f32]| {
                    let plain: f64 = state.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    cap.map_or(plain, |c| f64::from(c) * (plain / f64::from(c)).tanh())
                };
                let logits: Vec<f64> = weights.chunks(hidden).map(logit).collect();
                let top = logits.iter().copied().fold(f64::MIN, f64::max);
                let log = top + logits.iter().map(|l| (l - top).exp()).sum::<f64>().ln();
                logits.iter().map(|l| l - log).collect()
            };
            for r in [0, 1, 100, ROWS - 1, ROWS, rows - 1] {
                let (p, q) = (log_softmax(&full[r * hidden..][..hidden]), log_softmax(&reset[r * hidden..][..hidden]));
                assert!((found[r] - p[targets[r] as usize]).abs() < 1e-5);
                let exact: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
                assert!((kl[r] - exact).abs() < 1e-5, "{} {exact}", kl[r]);
                // A row alone has the bits it has among others.
                let alone = head.log_probabilities(&full[r * hidden..][..hidden], &targets[r..=r], &mut scratch).unwrap();
                assert_eq!(alone[0].to_bits(), found[r].to_bits());
            }
            let mut logits = vec![0.0; 2 * vocab];
            head.logits(&full[..2 * hidden], &mut logits, &mut scratch).unwrap();
            let top = logits[..vocab].iter().copied().fold(f32::MIN, f32::max);
            let log = f64::from(top) + logits[..vocab].iter().map(|l| f64::from(l - top).exp()).sum::<f64>().ln();
            assert!((f64::from(logits[targets[0] as usize]) - log - found[0]).abs() < 1e-5);
            assert!(matches!(head.log_probabilities(&full[..hidden], &[vocab as u32], &mut scratch), Err(ModelError::TokenId { .. })));
        }
    }
}
