//! Ways to choose cuts that `calibrate` and `eval` compare: the pipeline's own, presets, readouts and their sums, and comparators.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::spec::{MethodSettings, Objective, Pipeline, Preset, ReadoutWord, Segment};
use crate::score::Comparator;

/// A way to choose cuts.
#[derive(Debug, Clone, PartialEq)]
pub enum Method {
    /// What the pipeline says.
    Pipeline,
    /// A preset.
    Preset(Preset),
    /// Percentiles of a readout, or of a weighted sum of percentiles.
    Readouts(Vec<(ReadoutWord, f64)>),
    /// A score that removes no prefix.
    Comparator(Comparator),
    /// What an instruction model says when it is asked.
    Prompted,
}

impl Method {
    /// Those of `eval` and `calibrate` without a list: the pipeline's own, the readouts and the sum that the paper has, and all
    /// comparators but the prompted segmenter, which takes a hundred times as long.
    #[must_use]
    pub fn usual() -> Vec<Self> {
        let one = |word| Self::Readouts(vec![(word, 1.0)]);
        let readouts = [one(ReadoutWord::Rr), one(ReadoutWord::Lr), one(ReadoutWord::Embed)];
        let sum = Self::Readouts(vec![(ReadoutWord::Rr, 1.0), (ReadoutWord::Lr, 1.0)]);
        let comparators = Comparator::ALL.into_iter().map(Self::Comparator);
        std::iter::once(Self::Pipeline).chain(readouts).chain([sum]).chain(comparators).collect()
    }

    /// Its name: `pipeline`, `standard`, `rr`, `rr+0.5embed`, `sentence`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Pipeline => "pipeline".into(),
            Self::Preset(Preset::Standard) => "standard".into(),
            Self::Preset(Preset::Thorough) => "thorough".into(),
            Self::Preset(Preset::Paper) => "paper".into(),
            Self::Comparator(which) => which.as_str().into(),
            Self::Prompted => "prompted".into(),
            Self::Readouts(terms) => {
                let term = |(word, weight): &(ReadoutWord, f64)| {
                    let weight = if *weight == 1.0 { String::new() } else { weight.to_string() };
                    weight + word.readout().as_str()
                };
                terms.iter().map(term).collect::<Vec<_>>().join("+")
            }
        }
    }

    /// The pipeline that scores and cuts by it; of a comparator, the one whose candidates, layer and window it takes. Percentiles come from the pipeline's own
    /// `score` and `edges` if it cuts by percentiles itself, else from the paper's.
    #[must_use]
    pub fn pipeline(&self, own: &Pipeline) -> Pipeline {
        let percentiles = || {
            let mut base = if own.segment.objective == Objective::Percentile { own.clone() } else { with_preset(own, Preset::Paper) };
            base.score.stages = None;
            base.segment = cutting(own, &Segment::default());
            base
        };
        match self {
            Self::Pipeline => own.clone(),
            Self::Preset(preset) => with_preset(own, *preset),
            Self::Comparator(_) | Self::Prompted => {
                Pipeline { score: super::spec::Score { readouts: vec![ReadoutWord::Rr], ..percentiles().score }, ..percentiles() }
            }
            Self::Readouts(terms) => {
                let mut base = percentiles();
                base.score.readouts = terms.iter().map(|(word, _)| *word).collect();
                base.segment.utility = Some(weights(terms));
                base
            }
        }
    }

    /// It with what calibration found.
    #[must_use]
    pub fn with(&self, settings: Option<&MethodSettings>) -> Self {
        match (self, settings.and_then(|s| s.utility.as_ref())) {
            (Self::Readouts(terms), Some(found)) => {
                let weight = |(word, weight): &(ReadoutWord, f64)| (*word, found.get(word.readout().as_str()).copied().unwrap_or(*weight));
                Self::Readouts(terms.iter().map(weight).collect())
            }
            _ => self.clone(),
        }
    }
}

/// `segment.utility` of a sum.
pub(super) fn weights(terms: &[(ReadoutWord, f64)]) -> BTreeMap<String, f64> {
    terms.iter().map(|(word, weight)| (word.readout().as_str().to_owned(), *weight)).collect()
}

/// Lengths from one pipeline, what is maximised from another.
fn cutting(lengths: &Pipeline, objective: &Segment) -> Segment {
    let Segment { target, min, max, .. } = lengths.segment;
    Segment { target, min, max, ..objective.clone() }
}

/// A pipeline with a preset's way to score and cut; its input, model, cache and lengths stay.
pub(super) fn with_preset(own: &Pipeline, preset: Preset) -> Pipeline {
    let of = preset.pipeline();
    let mut found = own.clone();
    found.edges = of.edges;
    found.segment = cutting(own, &of.segment);
    let (encoder, context) = (own.score.encoder.clone(), own.score.context);
    let (batch_tokens, stage_memory) = (own.score.batch_tokens, own.score.stage_memory);
    found.score = super::spec::Score { encoder, context, batch_tokens, stage_memory, ..of.score };
    found
}

impl FromStr for Method {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "pipeline" => return Ok(Self::Pipeline),
            "standard" => return Ok(Self::Preset(Preset::Standard)),
            "thorough" => return Ok(Self::Preset(Preset::Thorough)),
            "paper" => return Ok(Self::Preset(Preset::Paper)),
            "prompted" => return Ok(Self::Prompted),
            _ => {}
        }
        if let Some(which) = Comparator::ALL.into_iter().find(|c| c.as_str() == name) {
            return Ok(Self::Comparator(which));
        }
        let term = |term: &str| {
            let term = term.trim();
            let digits = term.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(term.len());
            let weight = if digits == 0 { Some(1.0) } else { term[..digits].parse().ok().filter(|w: &f64| w.is_finite() && *w > 0.0) };
            weight.and_then(|weight| Some((ReadoutWord::parse(&term[digits..])?, weight)))
        };
        let terms: Option<Vec<_>> = name.split('+').map(term).collect();
        match terms {
            Some(terms) if !terms.iter().enumerate().any(|(i, t)| terms[..i].iter().any(|u| u.0 == t.0)) => Ok(Self::Readouts(terms)),
            _ => {
                let comparators = Comparator::ALL.map(Comparator::as_str).join(", ");
                Err(format!(
                    "{name:?} is no method; there are pipeline, standard, thorough, paper, the readouts rr, lr, kl, embed and sums of them such as rr+lr or rr+0.5embed, {comparators}, and prompted"
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in
            ["pipeline", "standard", "thorough", "paper", "rr", "rr+lr", "rr+0.5embed", "2rr+lr+kl", "ppl_minimum", "random", "prompted"]
        {
            assert_eq!(name.parse::<Method>().unwrap().name(), name);
        }
        for name in ["", "rr+", "rr+rr", "-1rr", "0rr", "xx", "rr lr"] {
            assert!(name.parse::<Method>().unwrap_err().contains("is no method"), "{name:?}");
        }
        assert!(Method::usual().iter().all(|m| m.name().parse::<Method>().unwrap() == *m));
    }

    #[test]
    fn percentiles_are_the_pipelines_own_or_the_papers() {
        let own = Pipeline::parse("preset = \"standard\"\n[segment]\ntarget = 100\n[score]\ncontext = 512").unwrap();
        let lr = "lr".parse::<Method>().unwrap().pipeline(&own);
        assert_eq!((lr.edges.grid, lr.score.window(), lr.score.reset_prefix.as_str()), (8, 24, "none"));
        assert_eq!((lr.segment.target, lr.score.context, lr.segment.objective), (100, 512, Objective::Percentile));
        assert_eq!((lr.segment.penalty(), lr.segment.length_weight()), (0.95, 0.02));
        lr.validate().unwrap();
        let own = Pipeline::parse("preset = \"paper\"\n[score]\nlayer = 3\nwindow = 16\n[segment]\npenalty = 0.7").unwrap();
        let sum = "rr+0.5lr".parse::<Method>().unwrap().pipeline(&own);
        assert_eq!((sum.score.window(), sum.score.layer.clone(), sum.segment.penalty), (16, own.score.layer.clone(), None));
        sum.validate().unwrap();
        let standard = Method::Preset(Preset::Standard).pipeline(&own);
        assert_eq!((standard.segment.objective, standard.edges.grid, standard.segment.penalty()), (Objective::ChunkDamage, 32, 22.0));
        standard.validate().unwrap();
        Method::Comparator(Comparator::Random).pipeline(&own).validate().unwrap();
    }

    #[test]
    fn calibrated_weights_replace_those_of_the_name() {
        let settings = MethodSettings { penalty: 0.9, utility: Some([("lr".to_owned(), 0.25)].into()) };
        assert_eq!("rr+lr".parse::<Method>().unwrap().with(Some(&settings)).name(), "rr+0.25lr");
        assert_eq!(Method::Pipeline.with(Some(&settings)), Method::Pipeline);
    }
}
