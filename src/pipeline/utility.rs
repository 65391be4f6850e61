//! From the scores of several readouts to the one number per edge whose percentile is its utility (design section 2).

use super::spec::{Pipeline, ReadoutWord};
use crate::score::{Curves, Readout, score_at};
use crate::segment::{grouped_percentiles, percentiles};

/// A readout at a horizon, and what its percentile weighs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Term {
    readout: Readout,
    horizon: u32,
    weight: f64,
}

/// What an edge is judged by.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recipe {
    /// Ordered by readout, then horizon: the order of the sum.
    terms: Vec<Term>,
    skip: u32,
}

/// Curves of a readout.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReadoutCurves {
    pub(super) readout: Readout,
    /// One per candidate.
    pub(super) curves: Curves,
    /// The horizon of the last stage that each candidate ran.
    pub(super) reach: Vec<u32>,
}

/// A key of `segment.utility`: a readout, `@`, a horizon in tokens; without a suffix the horizon is `window`.
pub(super) fn parse_term(key: &str, window: u32) -> Result<(ReadoutWord, u32), String> {
    let (word, horizon) = key.split_once('@').map_or((key, None), |(word, horizon)| (word, Some(horizon)));
    let readout = ReadoutWord::parse(word).ok_or_else(|| format!("{word:?} is no readout (rr, lr, kl, embed)"))?;
    if readout == ReadoutWord::Embed && horizon.is_some() {
        return Err(format!("{key:?}: the embedding boundary has no horizon; write \"embed\""));
    }
    let horizon = match horizon {
        None => window,
        Some(text) => text.parse().map_err(|_| format!("{key:?}: {text:?} is no number of tokens"))?,
    };
    if horizon != window && (horizon == 0 || horizon > window || !horizon.is_multiple_of(8)) {
        return Err(format!("{key:?}: a horizon is a multiple of 8 up to the last window ({window}), or that itself"));
    }
    Ok((readout, horizon))
}

impl Recipe {
    /// The recipe of a valid pipeline.
    pub(super) fn new(pipeline: &Pipeline) -> Self {
        let window = pipeline.score.window();
        let mut terms: Vec<Term> = match &pipeline.segment.utility {
            None => {
                pipeline.score.readouts.first().map(|r| Term { readout: r.readout(), horizon: window, weight: 1.0 }).into_iter().collect()
            }
            Some(weights) => weights
                .iter()
                .filter_map(|(key, &weight)| {
                    parse_term(key, window).ok().map(|(r, horizon)| Term { readout: r.readout(), horizon, weight })
                })
                .collect(),
        };
        terms.sort_by_key(|t| (t.readout, t.horizon));
        Self { terms, skip: pipeline.score.skip }
    }

    /// Scores of one readout at a horizon, or as far as a candidate was scored, one per candidate, given how many tokens lie right of each.
    pub(super) fn scores(&self, of: &ReadoutCurves, horizon: u32, after: &[u32]) -> Vec<f32> {
        let score = |((curve, &reach), &after): ((&[f32], &u32), &u32)| score_at(of.readout, curve, reach.min(after), self.skip, horizon);
        of.curves.iter().zip(&of.reach).zip(after).map(score).collect()
    }

    /// The number per candidate whose percentile is its utility, and that percentile. The number is the score of a single term, among edges that went equally
    /// far, those that went further ranking above; with several terms the weighted sum of percentiles among the candidates that every term scored. NaN for
    /// the others.
    pub(super) fn combine(&self, all: &[ReadoutCurves], after: &[u32]) -> (Vec<f32>, Vec<f64>) {
        let of_term = |term: &Term| all.iter().find(|curves| curves.readout == term.readout);
        let scores_of = |term: &Term| of_term(term).map_or_else(|| vec![f32::NAN; after.len()], |c| self.scores(c, term.horizon, after));
        let rank = |term: &Term, scores: &[f32]| match of_term(term) {
            Some(curves) => grouped_percentiles(|i| curves.reach[i].min(term.horizon), scores),
            None => vec![f64::NAN; after.len()],
        };
        let mut scores: Vec<Vec<f32>> = self.terms.iter().map(scores_of).collect();
        if let [term] = self.terms[..] {
            let scores = scores.remove(0);
            let utilities = rank(&term, &scores);
            return (scores, utilities);
        }
        let whole: Vec<bool> = (0..after.len()).map(|i| scores.iter().all(|s| !s[i].is_nan())).collect();
        let mut sums = vec![0.0_f64; after.len()];
        for (scores, term) in scores.iter_mut().zip(&self.terms) {
            scores.iter_mut().zip(&whole).filter(|(_, whole)| !**whole).for_each(|(s, _)| *s = f32::NAN);
            sums.iter_mut().zip(rank(term, scores)).for_each(|(sum, p)| *sum += term.weight * p);
        }
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        let utilities = percentiles(&sums);
        (sums, utilities)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_a_readout_and_a_horizon() {
        assert_eq!(parse_term("rr", 24), Ok((ReadoutWord::Rr, 24)));
        assert_eq!(parse_term("lr@16", 24), Ok((ReadoutWord::Lr, 16)));
        assert_eq!(parse_term("lr@20", 20), Ok((ReadoutWord::Lr, 20)));
        assert_eq!(parse_term("embed", 20), Ok((ReadoutWord::Embed, 20)));
        for bad in ["xx", "embed@8", "rr@", "rr@20", "rr@32", "rr@0", "rr@-8"] {
            assert!(parse_term(bad, 24).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sum_of_percentiles_counts_edges_that_all_terms_scored() {
        let pipeline =
            Pipeline::parse("[score]\nreadouts = [\"rr\", \"lr\"]\nskip = 0\nwindow = 8\n[segment]\nutility = { rr = 1.0, lr = 3.0 }")
                .unwrap();
        let recipe = Recipe::new(&pipeline);
        // Curves of windows of two tokens: cumulative sums at 1 and 2 tokens.
        let of = |readout, curves: [&[f32]; 3]| ReadoutCurves {
            readout,
            curves: curves.map(<[f32]>::to_vec).into_iter().collect(),
            reach: vec![8; 3],
        };
        let rr = of(Readout::Rr, [&[0.0, 2.0], &[0.0, 1.0], &[0.0, 1.5]]);
        let lr = of(Readout::Lr, [&[0.0, 1.0], &[0.0, 5.0], &[]]);
        let found = recipe.combine(&[rr.clone(), lr], &[2, 2, 2]);
        assert_eq!(found.0[..2], [1.0 + 3.0, 0.5 + 1.5]);
        assert!(found.0[2].is_nan() && found.1[..2] == [1.0, 0.5]);
        let alone = Recipe::new(&Pipeline::parse("[score]\nskip = 0\nwindow = 8").unwrap());
        assert_eq!(alone.combine(&[rr], &[2, 2, 2]).0, [1.0, 0.5, 0.75]);
    }

    #[test]
    fn an_edge_that_went_further_ranks_above_one_that_was_dropped() {
        let text = "[score]\nreadouts = [\"lr\"]\nstages = [[8, 0.5], [16]]";
        let curves = ReadoutCurves {
            readout: Readout::Lr,
            curves: [vec![0.0, 0.0, 1.0], vec![0.0, 0.0, 2.0, 9.0], vec![0.0, 0.0, 3.0, 4.0]].into_iter().collect(),
            reach: vec![8, 16, 16],
        };
        let utilities = |text: &str| Recipe::new(&Pipeline::parse(text).unwrap()).combine(std::slice::from_ref(&curves), &[99; 3]).1;
        assert_eq!(utilities(text), [1.0 / 3.0, 2.0 / 3.0, 1.0]);
        // At the horizon that all of them reached, the score alone counts.
        assert_eq!(utilities(&format!("{text}\n[segment]\nutility = {{ \"lr@8\" = 1.0 }}")), [1.0, 2.0 / 3.0, 1.0 / 3.0]);
    }
}
