//! The utility of an edge: its average-rank percentile within the document.

/// Average-rank percentiles: average rank / number of scores, in (0, 1]; equal scores (and -0 and 0) share their ranks' average.
///
/// NaN scores are not counted and give NaN.
#[must_use]
pub fn percentiles(scores: &[f32]) -> Vec<f64> {
    grouped_percentiles(|_| 0, scores)
}

/// [`percentiles`] where a score of a higher group ranks above every one of a lower group.
#[must_use]
pub fn grouped_percentiles(group: impl Fn(usize) -> u32, scores: &[f32]) -> Vec<f64> {
    // Group and score as one number: adding 0 turns -0 into 0, and floats of one sign are ordered as their bits are, those below 0 the other way round.
    let key = |i: usize| {
        let bits = (scores[i] + 0.0).to_bits();
        u64::from(group(i)) << 32 | u64::from(if bits >> 31 == 0 { bits | 1 << 31 } else { !bits })
    };
    let mut order: Vec<(u64, u32)> = (0..scores.len()).filter(|&i| !scores[i].is_nan()).map(|i| (key(i), i as u32)).collect();
    order.sort_unstable();
    let mut out = vec![f64::NAN; scores.len()];
    let mut first = 0;
    while first < order.len() {
        let tied = order[first..].iter().take_while(|o| o.0 == order[first].0).count();
        // Ranks first+1 ..= first+tied; twice their average is an integer, so the quotient is rounded once.
        let utility = (2 * first + tied + 1) as f64 / (2 * order.len()) as f64;
        for &(_, i) in &order[first..first + tied] {
            out[i as usize] = utility;
        }
        first += tied;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{grouped_percentiles, percentiles};

    #[test]
    fn a_higher_group_ranks_above_whatever_its_scores() {
        let groups = [8, 24, 8, 24];
        assert_eq!(grouped_percentiles(|i| groups[i], &[5.0, 1.0, 5.0, 2.0]), [0.375, 0.75, 0.375, 1.0]);
    }

    #[test]
    fn ties_share_their_average_rank() {
        assert_eq!(percentiles(&[3.0, 1.0, 1.0, 2.0]), [1.0, 0.375, 0.375, 0.75]);
        assert_eq!(percentiles(&[0.0, -0.0]), [0.75, 0.75]);
    }

    #[test]
    fn nan_is_not_counted() {
        let p = percentiles(&[f32::NAN, 5.0, 4.0]);
        assert!(p[0].is_nan());
        assert_eq!(p[1..], [1.0, 0.5]);
        assert!(percentiles(&[]).is_empty());
    }
}
