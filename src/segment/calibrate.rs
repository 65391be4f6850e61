//! Finding the cut penalty that gives chunks of a wanted mean length.

/// Penalties of an objective, and which way they work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Smallest and largest penalty.
    pub range: (f64, f64),
    /// Penalties are found to one part in so many.
    pub steps: u32,
    /// Whether a larger penalty gives more cuts rather than fewer.
    pub rewards: bool,
}

/// Penalties of percentiles: no percentile below the lower end is ever worth less than nothing, none above the upper end is cut.
pub const PERCENTILES: Scale = Scale { range: (-1.0, 2.0), steps: 10_000, rewards: false };

/// Penalties of chunk damage, in nats: what a cut may cost.
pub const NATS: Scale = Scale { range: (-1_000.0, 10_000.0), steps: 100, rewards: true };

/// The outcome of a calibration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// The penalty found, a multiple of the scale's step.
    pub penalty: f64,
    /// Mean tokens of a chunk at that penalty.
    pub mean_tokens: f64,
}

/// Bisects the penalty for which `tokens / chunks(penalty)` comes nearest to `target_mean`.
///
/// `chunks` gives the number of chunks of the whole sample at a penalty; it never changes against the scale's direction.
pub fn calibrate<E>(scale: Scale, tokens: u64, target_mean: f64, mut chunks: impl FnMut(f64) -> Result<u64, E>) -> Result<Calibration, E> {
    let (first, last) = scale.range;
    let (first, last) = ((first * f64::from(scale.steps)) as i64, (last * f64::from(scale.steps)) as i64);
    // Steps run in the direction in which chunks grow longer.
    let penalty = |step: i64| (if scale.rewards { last - step } else { first + step }) as f64 / f64::from(scale.steps);
    let mut mean = |step: i64| -> Result<f64, E> { Ok(tokens as f64 / chunks(penalty(step))?.max(1) as f64) };
    let (mut low, mut high) = (0, last - first);
    let (mut at_low, mut at_high) = (mean(low)?, mean(high)?);
    // Invariant: mean(low) <= target_mean <= mean(high), where the range allows.
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let value = mean(middle)?;
        if value <= target_mean {
            (low, at_low) = (middle, value);
        } else {
            (high, at_high) = (middle, value);
        }
    }
    let nearer_low = (target_mean - at_low).abs() <= (at_high - target_mean).abs();
    let (step, mean_tokens) = if nearer_low { (low, at_low) } else { (high, at_high) };
    Ok(Calibration { penalty: penalty(step), mean_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_penalty_of_a_known_curve() {
        // Chunks fall linearly from 400 at -1 to 100 at 2.
        let chunks = |p: f64| Ok::<_, ()>((300.0 - 100.0 * p).round() as u64);
        let found = calibrate(PERCENTILES, 30_000, 150.0, chunks).unwrap();
        assert!((found.mean_tokens - 150.0).abs() < 0.5 && (found.penalty - 1.0).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn rewards_work_the_other_way() {
        let chunks = |nats: f64| Ok::<_, ()>((100.0 + 10.0 * nats.clamp(0.0, 30.0)).round() as u64);
        let found = calibrate(NATS, 30_000, 150.0, chunks).unwrap();
        assert!((found.mean_tokens - 150.0).abs() < 0.5 && (found.penalty - 10.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn a_mean_out_of_reach_gives_the_end_of_the_range() {
        let found = calibrate(PERCENTILES, 1000, 1e9, |_| Ok::<_, ()>(10)).unwrap();
        assert_eq!(found.mean_tokens, 100.0);
    }
}
