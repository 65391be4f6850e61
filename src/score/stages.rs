//! Staged scoring (design section 2): every candidate runs a few tokens, the best go on to more.

use super::curve::{Curves, Knots};

/// A stage that is not the last: every candidate that came so far runs `horizon` tokens, then the best `keep` of all the document's go on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stage {
    /// Tokens of the window, a multiple of 8.
    pub horizon: u32,
    /// Share of all the document's candidates that go on, in 0..1; rounded up, at least 3.
    pub keep: f64,
}

/// Which of the candidates that ran a stage go on: those of least damage per token, ties to the earlier. `damages` holds the number of a candidate and its
/// damage per token; `all` is the number of the document's candidates.
pub(super) fn survivors(damages: impl IntoIterator<Item = (usize, f64)>, keep: f64, all: usize) -> Vec<usize> {
    // Damages as integers that are ordered as they are by `total_cmp`.
    let ordered = |(candidate, damage): (usize, f64)| {
        let bits = damage.to_bits();
        (if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }, candidate)
    };
    let mut damages: Vec<(u64, usize)> = damages.into_iter().map(ordered).collect();
    // A share such as 0.07 of 100 is 7, whatever binary fractions make of it.
    let count = ((keep * all as f64 - 1e-9).ceil().max(0.0) as usize).max(3);
    if count < damages.len() {
        damages.select_nth_unstable(count);
        damages.truncate(count);
    }
    let mut chosen: Vec<usize> = damages.into_iter().map(|(_, candidate)| candidate).collect();
    chosen.sort_unstable();
    chosen
}

/// Damage per token of a candidate once it has run to `horizon`, or to the end of the document, `after` tokens on, if that comes first. Its curve may be longer.
pub(super) fn damage_per_token(knots: &Knots, curve: &[f32], after: u32, horizon: u32) -> f64 {
    let tokens = horizon.min(after);
    let value = if tokens == after { curve.last() } else { curve.get(knots.kept(tokens).saturating_sub(1)) };
    value.map_or(f64::INFINITY, |&v| f64::from(v) / f64::from(tokens))
}

/// How far the stages let each candidate of a document go: the horizon of the last stage that it ran. From curves (of LR) that go at least so far, and how
/// many tokens lie right of each candidate; 0 for a candidate without a curve. `knots` are those of the window.
#[must_use]
pub fn reach(stages: &[Stage], window: u32, knots: &Knots, curves: &Curves, after: &[u32]) -> Vec<u32> {
    let mut left: Vec<usize> = (0..curves.len()).filter(|&i| !curves.get(i).is_empty()).collect();
    let all = left.len();
    let mut reach = vec![0; curves.len()];
    for stage in stages {
        left.iter().for_each(|&i| reach[i] = stage.horizon);
        let damages = left.iter().map(|&i| (i, damage_per_token(knots, curves.get(i), after[i], stage.horizon)));
        left = survivors(damages, stage.keep, all);
    }
    left.into_iter().for_each(|i| reach[i] = window);
    reach
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_go_on_rounded_up_and_ties_go_to_the_earlier() {
        let damages: Vec<(usize, f64)> = [3.0, 1.0, 2.0, 1.0, 0.5, 9.0, 1.0].into_iter().enumerate().collect();
        assert_eq!(survivors(damages.clone(), 0.5, 7), [1, 3, 4, 6]);
        assert_eq!(survivors(damages.clone(), 0.01, 7), [1, 3, 4], "three at least");
        assert_eq!(survivors(damages[..2].to_vec(), 0.9, 7), [0, 1]);
        let many: Vec<(usize, f64)> = (0..100).map(|i| (i, i as f64)).collect();
        assert_eq!(survivors(many, 0.07, 100).len(), 7);
    }

    #[test]
    fn reach_follows_the_stages_and_ignores_what_longer_curves_hold_beyond() {
        // Curves of windows of 16 tokens, kept at 1, 2, 8 and 16: damages at 8 tokens decide.
        let curve = |at8: f32, at16: f32| vec![0.0, 0.0, at8, at16];
        let curves: Curves =
            [curve(5.0, 0.0), curve(1.0, 90.0), curve(2.0, 90.0), curve(3.0, 90.0), vec![], curve(4.0, 0.0)].into_iter().collect();
        let stages = [Stage { horizon: 8, keep: 0.6 }];
        assert_eq!(reach(&stages, 16, &Knots::new(16, 1), &curves, &[99; 6]), [8, 16, 16, 16, 0, 8]);
        // A window that the document's end cuts off before 8 tokens is judged by what it has.
        let short: Curves =
            [curve(5.0, 0.0), vec![0.0, 0.0, 1.0], curve(2.0, 90.0), curve(3.0, 90.0), vec![], curve(4.0, 0.0)].into_iter().collect();
        assert_eq!(reach(&stages, 16, &Knots::new(16, 1), &short, &[99, 4, 99, 99, 2, 99]), [8, 16, 16, 16, 0, 8]);
        assert_eq!(reach(&[], 16, &Knots::new(16, 1), &curves, &[99; 6])[..2], [16, 16]);
    }
}
