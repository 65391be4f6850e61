//! Intervals by drawing documents, or clusters of them, again.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Random numbers of a seed, the same on every machine and in every version: BLAKE3 of the seed, read on.
#[derive(Debug, Clone)]
pub struct Dice(blake3::OutputReader);

impl Dice {
    /// The numbers of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof())
    }

    /// A whole number below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        ((u128::from(u64::from_le_bytes(bytes)) * n as u128) >> 64) as usize
    }
}

/// A value and where 95 of 100 resamples lie.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Interval {
    /// Of the documents as they are.
    pub value: f64,
    /// 2.5th percentile of the resamples.
    pub low: f64,
    /// 97.5th percentile of the resamples.
    pub high: f64,
}

impl Interval {
    /// From a value and its resamples; those without a value are left out. Percentiles between two resamples are interpolated.
    #[must_use]
    pub fn of(value: f64, resamples: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = resamples.into_iter().filter(|v| !v.is_nan()).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * sorted.len().saturating_sub(1) as f64;
            let (low, part) = (place.floor() as usize, place.fract());
            match (sorted.get(low), sorted.get(low + 1)) {
                (Some(a), Some(b)) => a + part * (b - a),
                (Some(a), None) => *a,
                _ => f64::NAN,
            }
        };
        Self { value, low: at(0.025), high: at(0.975) }
    }
}

/// Which items are drawn from among which: items of a cluster together, clusters within their stratum.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Strata(Vec<Vec<Vec<usize>>>);

impl Strata {
    /// Every item is a cluster of its own; the items of a stratum share a name.
    #[must_use]
    pub fn by_name<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut strata = std::collections::BTreeMap::<&str, Vec<Vec<usize>>>::new();
        for (i, name) in names.into_iter().enumerate() {
            strata.entry(name).or_default().push(vec![i]);
        }
        Self(strata.into_values().collect())
    }

    /// One stratum, whose clusters are the items that share a name.
    #[must_use]
    pub fn clusters<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut clusters = std::collections::BTreeMap::<&str, Vec<usize>>::new();
        for (i, name) in names.into_iter().enumerate() {
            clusters.entry(name).or_default().push(i);
        }
        Self(vec![clusters.into_values().collect()])
    }
}

/// Draws as many clusters as there are in each stratum, with replacement, `times` times, and gives what `statistic` makes of the items drawn.
pub fn resample<T>(strata: &Strata, times: usize, seed: u64, mut statistic: impl FnMut(&[usize]) -> T) -> Vec<T> {
    let mut dice = Dice::new(seed);
    let mut drawn = Vec::new();
    let draw = |_| {
        drawn.clear();
        for clusters in &strata.0 {
            clusters.iter().for_each(|_| drawn.extend_from_slice(&clusters[dice.below(clusters.len())]));
        }
        statistic(&drawn)
    };
    (0..times).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_share_is_that_of_the_binomial_distribution() {
        // 100 items of which 30 count: a resample is binomial with n = 100 and p = 0.3, whose 2.5th and 97.5th percentiles are 21 and 39.
        let strata = Strata::by_name(std::iter::repeat_n("all", 100));
        let share = |drawn: &[usize]| drawn.iter().filter(|&&i| i < 30).count() as f64 / drawn.len() as f64;
        let found = Interval::of(0.3, resample(&strata, 10_000, 7, share));
        assert!((found.low - 0.21).abs() < 0.0101 && (found.high - 0.39).abs() < 0.0101, "{found:?}");
    }

    #[test]
    fn strata_keep_their_sizes_and_a_seed_its_draws() {
        let strata = Strata::by_name(["a", "b", "a", "b", "b"]);
        let count = |drawn: &[usize]| (drawn.iter().filter(|i| [0, 2].contains(*i)).count(), drawn.len());
        assert!(resample(&strata, 100, 1, count).iter().all(|c| *c == (2, 5)));
        let clusters = Strata::clusters(["x", "y", "x"]);
        assert!(
            resample(&clusters, 50, 1, <[usize]>::to_vec)
                .iter()
                .all(|d| d.iter().filter(|i| **i == 0).count() == d.iter().filter(|i| **i == 2).count())
        );
        let draws = |seed| resample(&strata, 5, seed, <[usize]>::to_vec);
        assert_eq!(draws(3), draws(3));
        assert_ne!(draws(3), draws(4));
    }

    #[test]
    fn percentiles_are_interpolated_and_what_has_no_value_is_left_out() {
        let found = Interval::of(0.5, (0..=40).map(f64::from).chain([f64::NAN]));
        assert_eq!((found.low, found.high), (1.0, 39.0));
        assert_eq!(Interval::of(0.0, [0.0, 1.0]).low, 0.025);
    }
}
