//! Measures of a partition against the true one, in tokens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tokens within which a cut still counts as near a true boundary.
pub const NEAR: u32 = 8;

/// What one document, or several, add to the measures.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counts {
    /// True units.
    pub units: f64,
    /// Units that a chunk recovers: it holds at least 90 % of the unit, and the unit at least 90 % of it.
    pub clean: f64,
    /// Tokens.
    pub tokens: f64,
    /// Tokens in the largest unit of their chunk.
    pub pure: f64,
    /// Tokens in the largest chunk of their unit.
    pub complete: f64,
    /// Chunks.
    pub chunks: f64,
    /// True boundaries, the ends of the document left out.
    pub boundaries: f64,
    /// Cuts.
    pub cuts: f64,
    /// Cuts at a true boundary.
    pub exact: f64,
    /// Cuts and boundaries at most [`NEAR`] tokens apart, each in one pair at most.
    pub near: f64,
    /// True boundaries that are candidate edges.
    pub covered: f64,
    /// Windows of P_k and WindowDiff.
    pub windows: f64,
    /// Windows whose ends are in one part here and in two there.
    pub pk_misses: f64,
    /// Windows that hold different numbers of boundaries here and there.
    pub window_diff_misses: f64,
}

/// A measure, a quotient of sums of [`Counts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Share of units that one chunk recovers.
    CleanUnitRecovery,
    /// Harmonic mean of token-weighted chunk purity and unit completeness.
    PartitionF1,
    /// Share of cuts that lie on a true boundary.
    BoundaryPrecision,
    /// Share of true boundaries that are cut at.
    BoundaryRecall,
    /// Their harmonic mean.
    BoundaryF1,
    /// The same three with up to [`NEAR`] tokens between cut and boundary.
    NearPrecision,
    /// See [`Measure::NearPrecision`].
    NearRecall,
    /// See [`Measure::NearPrecision`].
    NearF1,
    /// P_k (Beeferman), pooled over windows; lower is better.
    Pk,
    /// WindowDiff (Pevzner and Hearst), pooled over windows; lower is better.
    WindowDiff,
    /// Share of true boundaries that are candidates.
    Coverage,
    /// Mean tokens of a chunk.
    MeanTokens,
    /// Chunks over true units.
    ChunksPerUnit,
}

impl Measure {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::CleanUnitRecovery,
        Self::PartitionF1,
        Self::BoundaryPrecision,
        Self::BoundaryRecall,
        Self::BoundaryF1,
        Self::NearPrecision,
        Self::NearRecall,
        Self::NearF1,
        Self::Pk,
        Self::WindowDiff,
        Self::Coverage,
        Self::MeanTokens,
        Self::ChunksPerUnit,
    ];

    /// Its value; NaN where it has none, such as the precision of no cuts.
    #[must_use]
    pub fn of(self, c: &Counts) -> f64 {
        let harmonic = |a: f64, b: f64| if a + b > 0.0 { 2.0 * a * b / (a + b) } else { 0.0 };
        match self {
            Self::CleanUnitRecovery => c.clean / c.units,
            Self::PartitionF1 => harmonic(c.pure / c.tokens, c.complete / c.tokens),
            Self::BoundaryPrecision => c.exact / c.cuts,
            Self::BoundaryRecall => c.exact / c.boundaries,
            // Twice the hits over both: the harmonic mean, with a value also where there are no cuts.
            Self::BoundaryF1 => 2.0 * c.exact / (c.cuts + c.boundaries),
            Self::NearPrecision => c.near / c.cuts,
            Self::NearRecall => c.near / c.boundaries,
            Self::NearF1 => 2.0 * c.near / (c.cuts + c.boundaries),
            Self::Pk => c.pk_misses / c.windows,
            Self::WindowDiff => c.window_diff_misses / c.windows,
            Self::Coverage => c.covered / c.boundaries,
            Self::MeanTokens => c.tokens / c.chunks,
            Self::ChunksPerUnit => c.chunks / c.units,
        }
    }
}

impl std::ops::AddAssign<&Counts> for Counts {
    fn add_assign(&mut self, o: &Counts) {
        self.units += o.units;
        self.clean += o.clean;
        self.tokens += o.tokens;
        self.pure += o.pure;
        self.complete += o.complete;
        self.chunks += o.chunks;
        self.boundaries += o.boundaries;
        self.cuts += o.cuts;
        self.exact += o.exact;
        self.near += o.near;
        self.covered += o.covered;
        self.windows += o.windows;
        self.pk_misses += o.pk_misses;
        self.window_diff_misses += o.window_diff_misses;
    }
}

/// The window of P_k and WindowDiff, k: half the mean length of the true units, rounded half to even, at least 2 (segeval's definition).
#[must_use]
pub fn window_size(tokens: u32, units: usize) -> u32 {
    // tokens / (2 units), rounded.
    let (double, units) = (u64::from(tokens), 2 * units.max(1) as u64);
    let (whole, rest) = (double / units, double % units);
    let up = 2 * rest > units || (2 * rest == units && whole % 2 == 1);
    (whole + u64::from(up)).max(2) as u32
}

/// Compares chunks with true units of a document of `tokens` tokens.
///
/// `cuts` and `boundaries` are where a chunk or unit begins, but for the first: ascending, above 0, below `tokens`. `candidates` are the edges that could be
/// cut at, ascending.
#[must_use]
pub fn compare(tokens: u32, boundaries: &[u32], cuts: &[u32], candidates: &[u32]) -> Counts {
    let (units, chunks) = (spans(tokens, boundaries), spans(tokens, cuts));
    let best = |part: &(u32, u32), of: &[(u32, u32)]| of.iter().map(|other| overlap(*part, *other)).max().unwrap_or(0);
    // In whole numbers: ten times the overlap against nine times either length.
    let recovers = |unit: &(u32, u32), chunk: &(u32, u32)| {
        let shared = 10 * overlap(*unit, *chunk);
        shared >= 9 * u64::from(unit.1 - unit.0) && shared >= 9 * u64::from(chunk.1 - chunk.0)
    };
    let k = window_size(tokens, units.len()) as usize;
    let (of_unit, of_chunk) = (part_of(tokens, boundaries), part_of(tokens, cuts));
    let windows = (tokens as usize).saturating_sub(k);
    let differ = |same: &dyn Fn(u32, u32) -> bool| {
        (0..windows).filter(|&i| !same(of_unit[i + k] - of_unit[i], of_chunk[i + k] - of_chunk[i])).count()
    };
    Counts {
        units: units.len() as f64,
        clean: units.iter().filter(|unit| chunks.iter().any(|chunk| recovers(unit, chunk))).count() as f64,
        tokens: f64::from(tokens),
        pure: chunks.iter().map(|chunk| best(chunk, &units)).sum::<u64>() as f64,
        complete: units.iter().map(|unit| best(unit, &chunks)).sum::<u64>() as f64,
        chunks: chunks.len() as f64,
        boundaries: boundaries.len() as f64,
        cuts: cuts.len() as f64,
        exact: pairs(boundaries, cuts, 0),
        near: pairs(boundaries, cuts, NEAR),
        covered: pairs(boundaries, candidates, 0),
        windows: windows as f64,
        pk_misses: differ(&|unit, chunk| (unit == 0) == (chunk == 0)) as f64,
        window_diff_misses: differ(&|unit, chunk| unit == chunk) as f64,
    }
}

fn spans(tokens: u32, starts: &[u32]) -> Vec<(u32, u32)> {
    let ends = starts.iter().copied().chain([tokens]);
    std::iter::once(0).chain(starts.iter().copied()).zip(ends).collect()
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> u64 {
    u64::from(a.1.min(b.1).saturating_sub(a.0.max(b.0)))
}

/// The number of the part that each token lies in.
fn part_of(tokens: u32, starts: &[u32]) -> Vec<u32> {
    spans(tokens, starts).iter().zip(0..).flat_map(|(span, i)| (span.0..span.1).map(move |_| i)).collect()
}

/// Pairs of one of each at most `apart` apart, as many as there can be: the first that can still be paired is.
fn pairs(a: &[u32], b: &[u32], apart: u32) -> f64 {
    let (mut i, mut j, mut found) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        if a[i].abs_diff(b[j]) <= apart {
            (i, j, found) = (i + 1, j + 1, found + 1);
        } else if a[i] < b[j] {
            i += 1;
        } else {
            j += 1;
        }
    }
    f64::from(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts of parts from their lengths.
    fn starts(lengths: &[u32]) -> (u32, Vec<u32>) {
        let mut ends: Vec<u32> = lengths.iter().scan(0, |sum, l| Some(std::mem::replace(sum, *sum + l) + l)).collect();
        let tokens = ends.pop().unwrap();
        (tokens, ends)
    }

    fn by_lengths(chunks: &[u32], units: &[u32]) -> Counts {
        let ((tokens, cuts), (same, boundaries)) = (starts(chunks), starts(units));
        assert_eq!(tokens, same);
        compare(tokens, &boundaries, &cuts, &cuts)
    }

    #[test]
    fn windows_are_those_of_segeval() {
        // Chunks, units, k, P_k misses, WindowDiff misses and windows by segeval 2.0.11.
        type Case = (&'static [u32], &'static [u32], u32, f64, f64, f64);
        let cases: [Case; 8] = [
            (&[4, 6], &[5, 5], 2, 2.0, 2.0, 8.0),
            (&[6, 8], &[7, 7], 4, 2.0, 2.0, 10.0),
            (&[40], &[10, 10, 20], 7, 14.0, 14.0, 33.0),
            (&[3, 3, 3, 3], &[6, 6], 3, 6.0, 6.0, 9.0),
            (&[2, 10, 2, 6], &[7, 7, 6], 3, 7.0, 8.0, 17.0),
            (&[5, 5], &[5, 5], 2, 0.0, 0.0, 8.0),
            (&[1, 1, 8], &[2, 8], 2, 0.0, 1.0, 8.0),
            (&[9, 1], &[3, 3, 4], 2, 5.0, 5.0, 8.0),
        ];
        for (chunks, units, k, pk, window_diff, windows) in cases {
            let found = by_lengths(chunks, units);
            let expected = (k, pk, window_diff, windows);
            let all = window_size(units.iter().sum(), units.len());
            assert_eq!((all, found.pk_misses, found.window_diff_misses, found.windows), expected, "{chunks:?} {units:?}");
        }
        assert_eq!(window_size(20, 4), 2, "2.5 goes to the even 2");
        assert_eq!(window_size(28, 4), 4, "3.5 goes to the even 4");
    }

    #[test]
    fn a_hand_worked_case() {
        // Units 0..100, 100..200, 200..240; chunks 0..95, 95..205, 205..240.
        let c = by_lengths(&[95, 110, 35], &[100, 100, 40]);
        // The first chunk lies within the first unit and holds 95 of its 100; the second holds the second whole, which is 100 of its 110: 0.909; the third
        // holds 35 of 40: 0.875.
        assert_eq!((c.clean, c.units), (2.0, 3.0));
        assert_eq!((c.pure, c.complete), (95.0 + 100.0 + 35.0, 95.0 + 100.0 + 35.0));
        assert_eq!((c.exact, c.near, c.cuts, c.boundaries), (0.0, 2.0, 2.0, 2.0));
        let c = by_lengths(&[240], &[100, 100, 40]);
        assert_eq!((c.pure, c.complete, c.clean), (100.0, 240.0, 0.0));
        let (purity, completeness) = (100.0 / 240.0, 1.0);
        assert!((Measure::PartitionF1.of(&c) - 2.0 * purity * completeness / (purity + completeness)).abs() < 1e-12);
        assert!(Measure::BoundaryPrecision.of(&c).is_nan() && Measure::BoundaryF1.of(&c) == 0.0);
    }

    #[test]
    fn nine_tenths_is_enough_and_a_token_less_is_not() {
        assert_eq!(by_lengths(&[9, 11], &[10, 10]).clean, 2.0);
        assert_eq!(by_lengths(&[89, 111], &[100, 100]).clean, 1.0, "89 of 100; 100 of 111 is 0.9009");
        assert_eq!(by_lengths(&[90, 110], &[100, 100]).clean, 2.0);
    }

    #[test]
    fn a_cut_is_near_one_boundary_alone() {
        assert_eq!(pairs(&[10, 14], &[12], 8), 1.0);
        assert_eq!(pairs(&[10, 20], &[2, 12], 8), 2.0);
        assert_eq!(pairs(&[10], &[19], 8), 0.0);
        assert_eq!(compare(30, &[10, 20], &[10], &[5, 10, 15]).covered, 1.0);
    }
}
