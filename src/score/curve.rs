//! Curves: cumulative sums of a readout over its window.

use super::Readout;

/// What a reset pass gives a candidate: cumulative sums of the readout's terms, kept at [`kept_positions`].
///
/// Empty for an edge that has no score.
pub type Curve = Vec<f32>;

/// The curves of a document's candidates, in one piece of memory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curves {
    values: Vec<f32>,
    /// Where each curve ends in `values`.
    ends: Vec<u32>,
}

impl Curves {
    /// None yet, with room for some.
    #[must_use]
    pub fn with_capacity(curves: usize, values: usize) -> Self {
        Self { values: Vec::with_capacity(values), ends: Vec::with_capacity(curves) }
    }

    /// Adds a curve.
    pub fn push(&mut self, curve: impl IntoIterator<Item = f32>) {
        self.values.extend(curve);
        self.ends.push(self.values.len() as u32);
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Values of all of them.
    #[must_use]
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// The curve with this number; empty beyond the last.
    #[must_use]
    pub fn get(&self, number: usize) -> &[f32] {
        let end = self.ends.get(number).map_or(self.values.len(), |&end| end as usize);
        let start = number.checked_sub(1).map_or(0, |before| self.ends.get(before).map_or(self.values.len(), |&end| end as usize));
        &self.values[start..end]
    }

    /// All of them in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        (0..self.len()).map(|i| self.get(i))
    }
}

impl<C: IntoIterator<Item = f32>> FromIterator<C> for Curves {
    fn from_iter<I: IntoIterator<Item = C>>(curves: I) -> Self {
        let mut all = Self::default();
        curves.into_iter().for_each(|curve| all.push(curve));
        all
    }
}

/// Whether a curve keeps its value after `x` tokens wherever it ends.
fn is_kept(x: u32, skip: u32) -> bool {
    x > 0 && (x == skip || x == skip + 1 || x.is_multiple_of(8))
}

/// Values that a curve keeps of its first `tokens` tokens, but for one that is kept because the curve ends there.
fn kept_of(tokens: u32, skip: u32) -> usize {
    let apart = |x: u32| usize::from(x > 0 && x <= tokens && !x.is_multiple_of(8));
    (tokens / 8) as usize + apart(skip) + apart(skip + 1)
}

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
        let at = if tokens == m || is_kept(tokens, skip) { kept_of(tokens, skip) - usize::from(is_kept(tokens, skip)) } else { usize::MAX };
        curve.get(at).map_or(f64::NAN, |&v| f64::from(v))
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
pub struct Knots {
    /// Places.
    at: Vec<u32>,
    /// How many of them are at most so many tokens.
    kept: Vec<u32>,
    /// How far so many tokens are from the place before to the one behind, as a share.
    share: Vec<f64>,
    /// Windows with the roots of lengths in windows, up to the longest chunk that is asked for often.
    roots: Vec<(u32, Vec<f64>)>,
}

impl Knots {
    /// Of windows up to `window` tokens.
    #[must_use]
    pub fn new(window: u32, skip: u32) -> Self {
        let kept: Vec<u32> = (0..=window).map(|x| kept_of(x, skip) as u32).collect();
        let at: Vec<u32> = (1..=window).filter(|&x| is_kept(x, skip)).collect();
        let share = |len: usize| {
            let i = kept[len] as usize;
            let x0 = i.checked_sub(1).map_or(0, |i| at[i]);
            at.get(i).map_or(0.0, |&x1| f64::from(len as u32 - x0) / f64::from(x1 - x0))
        };
        let share = (0..=window as usize).map(share).collect();
        Self { at, kept, share, roots: Vec::new() }
    }

    /// With the roots that damages beyond these windows need, for chunks of at most `longest` tokens. Without them each is computed when it is asked for.
    #[must_use]
    pub fn with_roots(mut self, windows: impl IntoIterator<Item = u32>, longest: u32) -> Self {
        self.roots = windows.into_iter().map(|m| (m, (0..=longest).map(|len| root(len, m)).collect())).collect();
        self
    }

    /// Tokens at which a curve of a whole window is kept.
    #[must_use]
    pub fn places(&self) -> &[u32] {
        &self.at
    }

    /// Values that a longer curve keeps of its first `tokens` tokens.
    #[must_use]
    pub fn kept(&self, tokens: u32) -> usize {
        self.kept[(tokens as usize).min(self.kept.len() - 1)] as usize
    }

    /// The curve of a window that was scored for `m` tokens, to read damages off it.
    #[must_use]
    pub fn read<'a>(&'a self, curve: &'a [f32], m: u32) -> Damage<'a> {
        let roots = self.roots.iter().find(|(window, _)| *window == m).map_or(&[][..], |(_, roots)| roots);
        let last = curve.last().map_or(f64::NAN, |&last| f64::from(last));
        // The place where the curve ends has the same places around it as in a longer curve.
        let regular = if self.at.get(curve.len().wrapping_sub(1)) == Some(&m) { curve.len() } else { curve.len().saturating_sub(1) };
        Damage { knots: self, curve, m, last, regular, roots }
    }
}

/// sqrt(l / m).
fn root(len: u32, m: u32) -> f64 {
    (f64::from(len) / f64::from(m)).sqrt()
}

/// A curve to read damages off.
#[derive(Debug, Clone, Copy)]
pub struct Damage<'a> {
    knots: &'a Knots,
    curve: &'a [f32],
    m: u32,
    last: f64,
    /// Values at places of the knots.
    regular: usize,
    roots: &'a [f64],
}

impl<'a> Damage<'a> {
    /// The curve, and the tokens that it was scored for.
    #[must_use]
    pub fn curve(&self) -> (&'a [f32], u32) {
        (self.curve, self.m)
    }

    /// D(b, l): the damage of the first `len` tokens, in nats. Linear between kept values; beyond the window's m tokens, D(b, m) * sqrt(l / m). NaN for an
    /// empty curve.
    #[must_use]
    #[inline]
    pub fn of(&self, len: u32) -> f64 {
        if len >= self.m {
            return self.beyond(len);
        }
        let i = self.knots.kept(len);
        let y0 = if i == 0 { 0.0 } else { self.curve.get(i - 1).map_or(f64::NAN, |&y| f64::from(y)) };
        if i < self.regular {
            return y0 + (f64::from(self.curve[i]) - y0) * self.knots.share[(len as usize).min(self.knots.share.len() - 1)];
        }
        let x0 = i.checked_sub(1).map_or(0, |i| self.knots.at[i]);
        y0 + (self.last - y0) * (f64::from(len - x0) / f64::from(self.m - x0))
    }

    /// [`Self::of`] each of some lengths, in ascending order.
    #[inline]
    pub fn of_each(&self, lens: &[u32], out: &mut [f64]) {
        let within = lens.partition_point(|&len| len < self.m).min(out.len());
        let (near, far) = out.split_at_mut(within);
        near.iter_mut().zip(lens).for_each(|(out, &len)| *out = self.of(len));
        far.iter_mut().zip(&lens[within..]).for_each(|(out, &len)| *out = self.beyond(len));
    }

    #[inline]
    fn beyond(&self, len: u32) -> f64 {
        self.last * self.roots.get(len as usize).copied().unwrap_or_else(|| root(len, self.m))
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
            assert_eq!(knots.read(&curve, 20).of(kept), sum(kept));
        }
        assert_eq!(knots.read(&curve, 20).of(12), (sum(8) + sum(16)) / 2.0);
        assert_eq!(knots.read(&curve, 20).of(18), (sum(16) + sum(20)) / 2.0);
        assert_eq!(knots.read(&curve, 20).of(5), sum(2) + (sum(8) - sum(2)) / 2.0);
        assert_eq!(knots.read(&curve, 20).of(80), sum(20) * 2.0);
        assert!(knots.read(&[], 20).of(8).is_nan());
        // One that ended at a kept place, read with the knots of a longer window.
        assert_eq!(knots.read(&curve[..3], 8).of(4), sum(2) + (sum(8) - sum(2)) / 3.0);
        assert_eq!(knots.read(&curve[..3], 8).of(32), sum(8) * 2.0);
    }

    #[test]
    fn places_are_counted_as_they_are_listed() {
        for (skip, m) in (0..20).flat_map(|skip| (1..40).map(move |m| (skip, m))) {
            let listed: Vec<u32> = kept_positions(m, skip).collect();
            let values: Vec<f32> = listed.iter().map(|&x| x as f32).collect();
            for x in 1..=m {
                let regular = listed.iter().filter(|&&k| k <= x && is_kept(k, skip)).count();
                assert_eq!((kept_of(x, skip), Knots::new(m, skip).kept(x)), (regular, regular), "{skip} {m} {x}");
                if x > skip {
                    // RR's mean over the terms after the skip, of a curve whose value is its place.
                    let score = score_at(Readout::Rr, &values, m, skip, x);
                    assert_eq!(score.is_nan(), !listed.contains(&x), "{skip} {m} {x}");
                    assert!(score.is_nan() || score == 1.0);
                }
            }
        }
        let curves: Curves = [vec![1.0, 2.0], vec![], vec![3.0]].into_iter().collect();
        assert_eq!((curves.get(0), curves.get(1), curves.get(2), curves.get(9)), (&[1.0, 2.0][..], &[][..], &[3.0][..], &[][..]));
        assert_eq!((curves.len(), curves.value_count(), curves.iter().count()), (3, 3, 3));
    }

    #[test]
    fn skipping_nothing_reads_from_the_start() {
        let terms = [1.0, 3.0];
        assert_eq!(score_at(Readout::Rr, &curve(&terms, 0), 2, 0, 24), 2.0);
    }
}
