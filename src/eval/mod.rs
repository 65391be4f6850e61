//! Evaluation: how well chunks agree with true units, and how sure that is.
//!
//! Knows token positions and numbers alone: nothing of models, files or scores. Counts are sums over documents, so that a measure of any set of documents is
//! a quotient of sums, and drawing documents again costs additions.

mod bootstrap;
mod metrics;
mod streams;

pub use bootstrap::{Dice, Interval, Strata, resample};
pub use metrics::{Counts, Measure, NEAR, compare, window_size};
pub use streams::{Packing, Record, Stream, WordLikeness, flatten, lexical_cohesion, pack, reread};
