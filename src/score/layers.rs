//! Right Reset at every layer, from one full pass and one reset pass with a tap at each.

use super::{Readout, ScoreError, ScoreSpec};
use crate::model::ops;
use crate::model::{Batch, Scratch, Tap, Trunk};

/// Tokens of one batch of windows: the states of all layers are alive at once.
const TOKENS: usize = 512;

/// RR of each edge at each layer from 0 (the embeddings) to the last, by equation 1 of the paper; NaN where an edge has none. The layer that `spec` names does
/// not matter. One segment at most.
///
/// # Errors
/// [`ScoreError`] of the model, or [`ScoreError::Settings`] for a document longer than a segment.
pub fn rr_by_layer(
    trunk: &dyn Trunk,
    spec: &ScoreSpec,
    ids: &[u32],
    edges: &[u32],
    scratch: &mut Scratch,
) -> Result<Vec<Vec<f32>>, ScoreError> {
    let (n, hidden, layers) = (ids.len() as u32, trunk.shape().hidden, trunk.shape().layers);
    if n > spec.room() {
        return Err(ScoreError::Settings(format!("a layer sweep takes documents of at most {} tokens, one segment", spec.room())));
    }
    let taps: Vec<Tap> = (0..=layers).map(Tap::Layer).collect();
    let mut batch = Batch::default();
    batch.push(spec.full_pass(ids, 0));
    let full = trunk.forward(&batch, &taps, scratch)?;
    let mut out = vec![vec![f32::NAN; edges.len()]; taps.len()];
    let scored: Vec<usize> = (0..edges.len()).filter(|&e| spec.gives(Readout::Rr, edges[e], n)).collect();
    for some in scored.chunks((TOKENS / spec.window as usize).max(1)) {
        let mut batch = Batch::default();
        let before: Vec<usize> = some
            .iter()
            .map(|&edge| {
                let (tokens, before) = spec.reset_pass(ids, edges[edge]);
                batch.push(tokens);
                before
            })
            .collect();
        let reset = trunk.forward(&batch, &taps, scratch)?;
        for ((&edge, before), span) in some.iter().zip(before).zip(batch.sequences()) {
            let (row, first) = (spec.full_row(edges[edge], n), span.start + before);
            let (skip, m) = (spec.skip as usize, span.end - first);
            for ((out, full), reset) in out.iter_mut().zip(&full).zip(&reset) {
                let state = |states: &[f32], row: usize| states[row * hidden..(row + 1) * hidden].to_vec();
                let sum: f64 = (skip..m).map(|q| ops::cosine(&state(full, row + q), &state(reset, first + q))).sum();
                out[edge] = (sum / (m - skip) as f64) as f32;
            }
        }
    }
    Ok(out)
}
