//! Segmentation: percentiles of scores, the exact dynamic programs, and the calibration of a cut penalty.
//!
//! Knows nothing but numbers. Promises: the result equals brute force on any machine, since every term is rounded once to a multiple
//! of 2^-32 and summed as an integer.

mod calibrate;
mod percentile;
mod program;

pub use calibrate::{Calibration, NATS, PERCENTILES, Scale, calibrate};
pub use percentile::{grouped_percentiles, percentiles};
pub use program::{Cut, Limits, SegmentError, Segmentation, fixed_count, fixed_damage, open_count, open_counts, open_damage, open_damages};
