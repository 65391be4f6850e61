//! Curves: cumulative sums of a readout over its window.

use super::Readout;

/// What a reset pass gives a candidate: cumulative sums of the readout's terms, kept at [`kept_positions`].
///
/// Empty for an edge that has no score.
pub type Curve = Vec<f32>;

/// Token counts at which the curve of a window of `m` tokens is kept, ascending: `s` (the skipped terms of RR), `s + 1` (those of LR),
/// every multiple of 8, and `m`.
pub fn kept_positions(m: u32, skip: u32) -> impl Iterator<Item = u32> {
    (1..=m).filter(move |&x| x == skip || x == skip + 1 || x % 8 == 0 || x == m)
}

/// A readout's score at horizon `w`, oriented so that larger favours a cut.
///
/// RR (paper equation 1): the mean of the cosines at positions `s..min(w, m)`, in [-1, 1]. LR (equation 2) and KL: the mean of the
/// damages, or divergences, at tokens `s + 1..min(w, m)`, in nats, negated. The embedding boundary: its one value, in [0, 2], whatever the horizon.
///
/// NaN if the curve is empty, if the horizon leaves no term, or if the horizon is not kept (it is neither a multiple of 8 nor at least
/// `m`).
#[must_use]
pub fn score_at(readout: Readout, curve: &[f32], m: u32, skip: u32, horizon: u32) -> f32 {
    if readout == Readout::Embed {
        return curve.first().copied().unwrap_or(f32::NAN);
    }
    let (end, first) = (horizon.min(m), readout.first(skip));
    if end <= first {
        return f32::NAN;
    }
    let value = |tokens: u32| -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let at = kept_positions(m, skip).position(|x| x == tokens);
        at.and_then(|i| curve.get(i)).map_or(f64::NAN, |&v| f64::from(v))
    };
    let mean = (value(end) - value(first)) / f64::from(end - first);
    (if readout == Readout::Rr { mean } else { -mean }) as f32
}

/// A curve while its terms come in.
#[derive(Debug, Clone, Default)]
pub(super) struct Growing {
    /// What is kept so far.
    pub(super) curve: Curve,
    sum: f64,
    terms: u32,
}

impl Growing {
    /// Adds the next terms of a window of `m` tokens.
    pub(super) fn add(&mut self, terms: &[f64], m: u32, skip: u32) {
        for term in terms {
            self.sum += term;
            self.terms += 1;
            let x = self.terms;
            if x == skip || x == skip + 1 || x.is_multiple_of(8) || x == m {
                self.curve.push(self.sum as f32);
            }
        }
    }
}

/// The curve of the terms of a window, in order.
pub(super) fn curve(terms: &[f64], skip: u32) -> Curve {
    let mut growing = Growing::default();
    growing.add(terms, terms.len() as u32, skip);
    growing.curve
}

/// Where curves are kept, for reading damages of any length off them.
#[derive(Debug, Clone, PartialEq)]
pub struct Knots(Vec<u32>);

impl Knots {
    /// Of windows up to `window` tokens.
    #[must_use]
    pub fn new(window: u32, skip: u32) -> Self {
        Self((1..=window).filter(|&x| x == skip || x == skip + 1 || x.is_multiple_of(8)).collect())
    }

    /// Values that a longer curve keeps of its first `tokens` tokens.
    #[must_use]
    pub fn kept(&self, tokens: u32) -> usize {
        self.0.partition_point(|&x| x <= tokens)
    }

    /// D(b, l): the damage of the first `len` tokens, in nats, from the curve of a window that was scored for `m` tokens. Linear between kept values;
    /// beyond `m`, D(b, m) * sqrt(l / m). NaN for an empty curve.
    #[must_use]
    pub fn damage(&self, curve: &[f32], m: u32, len: u32) -> f64 {
        let Some((&last, before)) = curve.split_last() else { return f64::NAN };
        if len >= m {
            return f64::from(last) * (f64::from(len) / f64::from(m)).sqrt();
        }
        let i = self.kept(len).min(before.len());
        let (x0, y0) = i.checked_sub(1).map_or((0, 0.0), |i| (self.0[i], f64::from(before[i])));
        let (x1, y1) = before.get(i).map_or((m, f64::from(last)), |&y| (self.0[i], f64::from(y)));
        y0 + (y1 - y0) * (f64::from(len - x0) / f64::from(x1 - x0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_mean_of_the_terms_after_the_skip() {
        let terms: Vec<f64> = (0..20).map(f64::from).collect();
        let curve = curve(&terms, 1);
        assert_eq!(kept_positions(20, 1).collect::<Vec<_>>(), [1, 2, 8, 16, 20]);
        assert_eq!(score_at(Readout::Rr, &curve, 20, 1, 24), 10.0);
        assert_eq!(score_at(Readout::Rr, &curve, 20, 1, 8), 4.0);
        assert!(score_at(Readout::Rr, &curve, 20, 1, 9).is_nan(), "not kept");
        assert!(score_at(Readout::Rr, &curve, 20, 1, 1).is_nan(), "no term left");
        assert!(score_at(Readout::Rr, &[], 20, 1, 24).is_nan(), "no score");
    }

    #[test]
    fn damages_begin_a_token_later_and_are_negated() {
        let terms: Vec<f64> = (0..20).map(f64::from).collect();
        assert_eq!(score_at(Readout::Lr, &curve(&terms, 1), 20, 1, 8), -4.5);
        assert!(score_at(Readout::Lr, &curve(&terms[..2], 1), 2, 1, 8).is_nan(), "no term left");
    }

    #[test]
    fn damages_are_linear_between_what_is_kept_and_grow_with_the_root_beyond() {
        let terms: Vec<f64> = (0..20).map(f64::from).collect();
        let (curve, knots) = (curve(&terms, 1), Knots::new(24, 1));
        let sum = |n: u32| f64::from(n * (n - 1) / 2);
        for kept in [1, 2, 8, 16, 20] {
            assert_eq!(knots.damage(&curve, 20, kept), sum(kept));
        }
        assert_eq!(knots.damage(&curve, 20, 12), (sum(8) + sum(16)) / 2.0);
        assert_eq!(knots.damage(&curve, 20, 18), (sum(16) + sum(20)) / 2.0);
        assert_eq!(knots.damage(&curve, 20, 5), sum(2) + (sum(8) - sum(2)) / 2.0);
        assert_eq!(knots.damage(&curve, 20, 80), sum(20) * 2.0);
        assert!(knots.damage(&[], 20, 8).is_nan());
        // One that ended at a kept place, read with the knots of a longer window.
        assert_eq!(knots.damage(&curve[..3], 8, 4), sum(2) + (sum(8) - sum(2)) / 3.0);
        assert_eq!(knots.damage(&curve[..3], 8, 32), sum(8) * 2.0);
    }

    #[test]
    fn skipping_nothing_reads_from_the_start() {
        let terms = [1.0, 3.0];
        assert_eq!(score_at(Readout::Rr, &curve(&terms, 0), 2, 0, 24), 2.0);
    }
}
