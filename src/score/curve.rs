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

/// The curve of the terms of a window, in order.
pub(super) fn curve(terms: &[f64], skip: u32) -> Curve {
    let mut kept = kept_positions(terms.len() as u32, skip).peekable();
    let mut sum = 0.0;
    let mut out = Vec::new();
    for (q, term) in (1..).zip(terms) {
        sum += term;
        if kept.next_if_eq(&q).is_some() {
            out.push(sum as f32);
        }
    }
    out
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
    fn skipping_nothing_reads_from_the_start() {
        let terms = [1.0, 3.0];
        assert_eq!(score_at(Readout::Rr, &curve(&terms, 0), 2, 0, 24), 2.0);
    }
}
