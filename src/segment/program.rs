//! Exact dynamic programs over edges (paper section 3.3 and appendix A.3; design section 2).

use std::cmp::Ordering;

/// Lengths of chunks, in tokens, and what they cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Soft target T of a chunk; at least 1.
    pub target: u32,
    /// Hard minimum Lmin.
    pub min: u32,
    /// Hard maximum Lmax; at least `min` and at least 1.
    pub max: u32,
    /// Length coefficient lambda; not negative.
    pub length_weight: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { target: 192, min: 48, max: 384, length_weight: 0.02 }
    }
}

impl Limits {
    /// lambda ((len - T) / T)^2.
    fn length_term(&self, len: u32) -> f64 {
        let target = f64::from(self.target);
        let ratio = (f64::from(len) - target) / target;
        self.length_weight * (ratio * ratio)
    }
}

/// A place where the program may cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cut {
    /// Tokens on its left; ascending along a document, above 0 and below its length.
    pub token: u32,
    /// Utility of a candidate in (0, 1]; `None` for a fallback edge, whose utility is 0.
    pub utility: Option<f64>,
}

/// A solved document.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segmentation {
    /// Indices of the chosen edges, ascending. There is one chunk more than cuts.
    pub cuts: Vec<usize>,
    /// Tokens above Lmax, summed over chunks.
    pub tokens_over: u64,
    /// Tokens below Lmin, summed over chunks.
    pub tokens_under: u64,
    /// Cuts at fallback edges.
    pub fallback_cuts: u32,
}

impl Segmentation {
    /// Whether a limit gave way: one of the three counts is above 0, but for a one-chunk document shorter than Lmin.
    #[must_use]
    pub fn limits_relaxed(&self) -> bool {
        self.tokens_over > 0 || self.fallback_cuts > 0 || (self.tokens_under > 0 && !self.cuts.is_empty())
    }
}

/// Why a document cannot be segmented as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// No path through the edges has that many chunks.
    #[error("cannot be cut into {count} chunks: its edges allow {least} to {most}; the nearest feasible count is {nearest}")]
    InfeasibleCount {
        /// The count asked for.
        count: u32,
        /// Fewest chunks.
        least: u32,
        /// Most chunks.
        most: u32,
        /// The feasible count nearest to it.
        nearest: u32,
    },
    /// A fixed-count program would need too large a table.
    #[error("{count} chunks over {edges} edges need a larger table than the fixed-count program allows; use an open count")]
    TooLarge {
        /// The count asked for.
        count: u32,
        /// Edges of the document.
        edges: usize,
    },
}

/// Entries the table of the fixed-count program may have.
const MAX_TABLE: usize = 1 << 27;

/// What a way to finish a document costs, in the order of comparison; the smallest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Cost {
    over: u64,
    under: u64,
    fallback: u32,
    /// Length term minus utilities, in multiples of 2^-32.
    value: i128,
    cuts: u32,
}

impl Cost {
    fn plus(self, other: Self) -> Self {
        Self {
            over: self.over + other.over,
            under: self.under + other.under,
            fallback: self.fallback + other.fallback,
            value: self.value + other.value,
            cuts: self.cuts + other.cuts,
        }
    }
}

/// Rounds a term to a multiple of 2^-32, halves upwards (as `Math.round` does), saturating.
fn fixed(term: f64) -> i128 {
    (term * 4_294_967_296.0 + 0.5).floor() as i128
}

/// Costs of chunks and cuts of one document.
struct Costs {
    limits: Limits,
    /// Cost of a chunk of 0..=Lmax tokens.
    short: Vec<Cost>,
}

impl Costs {
    fn new(limits: Limits, tokens: u32) -> Self {
        let short = (0..=limits.max.min(tokens)).map(|len| Self::of_length(&limits, len)).collect();
        Self { limits, short }
    }

    fn of_length(limits: &Limits, len: u32) -> Cost {
        Cost {
            over: u64::from(len.saturating_sub(limits.max)),
            under: u64::from(limits.min.saturating_sub(len)),
            value: fixed(limits.length_term(len)),
            ..Cost::default()
        }
    }

    fn chunk(&self, len: u32) -> Cost {
        self.short.get(len as usize).copied().unwrap_or_else(|| Self::of_length(&self.limits, len))
    }
}

/// What each edge costs by itself when a chunk begins there, whatever its length.
fn cut_costs(edges: &[Cut]) -> Vec<Cost> {
    edges.iter().map(|edge| Cost { fallback: u32::from(edge.utility.is_none()), cuts: 1, ..Cost::default() }).collect()
}

/// Utility of each edge, rounded once.
fn utilities(edges: &[Cut]) -> Vec<i128> {
    edges.iter().map(|edge| fixed(edge.utility.unwrap_or(0.0))).collect()
}

/// Minus the damage of a candidate, rounded once; nothing for a fallback edge, whose number is fixed before values are compared.
fn spared(edges: &[Cut], damage: impl Fn(usize, &[u32], &mut [f64])) -> impl Fn(usize, u32) -> i128 {
    move |edge, len| if edges[edge].utility.is_some() { fixed(-one(&damage, edge, len)) } else { 0 }
}

/// What a function of an edge and several lengths says of one.
fn one(of: &impl Fn(usize, &[u32], &mut [f64]), edge: usize, len: u32) -> f64 {
    let mut value = [0.0];
    of(edge, &[len], &mut value);
    value[0]
}

/// Positions of the start, the edges and the end: node 0, nodes 1..=edges, and the last node.
fn nodes(edges: &[Cut], tokens: u32) -> Vec<u32> {
    std::iter::once(0).chain(edges.iter().map(|e| e.token)).chain([tokens]).collect()
}

/// Last node that a chunk from `node` may end at: the farthest within Lmax, or the next one if that is farther.
fn reach(at: &[u32], node: usize, max: u32, from: usize) -> usize {
    let mut last = from.max(node + 1);
    while last + 1 < at.len() && at[last + 1] - at[node] <= max {
        last += 1;
    }
    last
}

/// Open-count segmentation: chooses cuts C to maximise
///
/// ```text
/// sum over b in C of (u(b) - rho)  -  lambda * sum over chunks of ((len - T) / T)^2
/// ```
///
/// (paper appendix A.3) after minimising, in this order, tokens above Lmax, tokens below Lmin and fallback cuts; `penalty` is rho. Ties
/// go to fewer cuts, then to the lexicographically smallest list of cuts. O(edges x edges within Lmax).
#[must_use]
pub fn open_count(edges: &[Cut], tokens: u32, limits: &Limits, penalty: f64) -> Segmentation {
    open_counts(edges, tokens, limits, &[penalty]).pop().unwrap_or_default()
}

/// [`open_count`] at several penalties, side by side.
#[must_use]
pub fn open_counts(edges: &[Cut], tokens: u32, limits: &Limits, penalties: &[f64]) -> Vec<Segmentation> {
    open_all(edges, tokens, limits, penalties, |edge, _, worths| worths.fill(edges[edge].utility.unwrap_or(0.0)))
}

/// Open-count segmentation by chunk damage: chooses cuts C to maximise
///
/// ```text
/// sum over b in C of (rho - D(b, length of the chunk that starts at b))  -  lambda * sum over chunks of ((len - T) / T)^2
/// ```
///
/// with limits and ties as in [`open_count`]. `damage(i, l, d)` gives D(b, l), in nats, of the i-th edge for each of some lengths; it is asked only where a
/// utility stands (any will do).
#[must_use]
pub fn open_damage(edges: &[Cut], tokens: u32, limits: &Limits, penalty: f64, damage: impl Fn(usize, &[u32], &mut [f64])) -> Segmentation {
    open_damages(edges, tokens, limits, &[penalty], damage).pop().unwrap_or_default()
}

/// [`open_damage`] at several penalties, side by side: each damage is asked for once.
#[must_use]
pub fn open_damages(
    edges: &[Cut],
    tokens: u32,
    limits: &Limits,
    penalties: &[f64],
    damage: impl Fn(usize, &[u32], &mut [f64]),
) -> Vec<Segmentation> {
    // rho - D is (-D) - (-rho), to the bit.
    let against: Vec<f64> = penalties.iter().map(|p| -p).collect();
    open_all(edges, tokens, limits, &against, |edge, lens, worths| {
        if edges[edge].utility.is_some() {
            damage(edge, lens, worths);
            worths.iter_mut().for_each(|damage| *damage = -*damage);
        }
    })
}

/// Fixed-count segmentation by chunk damage: [`open_damage`] with exactly `count` chunks and rho = 0.
///
/// # Errors
/// As [`fixed_count`].
pub fn fixed_damage(
    edges: &[Cut],
    tokens: u32,
    limits: &Limits,
    count: u32,
    damage: impl Fn(usize, &[u32], &mut [f64]),
) -> Result<Segmentation, SegmentError> {
    fixed_chunks(edges, tokens, limits, count, spared(edges, damage))
}

/// Penalties that are solved side by side.
const LANES: usize = 8;
/// Nats, or percentiles, that each term must stay below for sums of 64 bits.
const LARGEST_TERM: f64 = 131_072.0;
/// Ways from a node that there is room for at once.
const WAYS: usize = 128;
/// Added to the cost of a way that limits exclude; no sum comes near.
const NEVER: i64 = 1 << 61;

/// The open-count program at several penalties: the i-th edge earns `worth(i, l)` less the penalty when a chunk of l tokens begins there; 0 where
/// nothing is written.
fn open_all(
    edges: &[Cut],
    tokens: u32,
    limits: &Limits,
    penalties: &[f64],
    worth: impl Fn(usize, &[u32], &mut [f64]),
) -> Vec<Segmentation> {
    let at = nodes(edges, tokens);
    let wide = |penalty: &f64| open_wide(edges, &at, &Costs::new(*limits, tokens), *penalty, &worth);
    if let [penalty] = penalties {
        let one = Problem { edges, at: &at, limits, penalties: &[[*penalty]], worth: &worth };
        return one.solve().unwrap_or_else(|| vec![wide(penalty)]);
    }
    let groups: Vec<[f64; LANES]> = penalties
        .chunks(LANES)
        .map(|some| {
            let mut lanes = [some.first().copied().unwrap_or(0.0); LANES];
            lanes[..some.len()].copy_from_slice(some);
            lanes
        })
        .collect();
    match (Problem { edges, at: &at, limits, penalties: &groups, worth: &worth }).solve() {
        Some(mut solved) => {
            solved.truncate(penalties.len());
            solved
        }
        None => penalties.iter().map(wide).collect(),
    }
}

/// The program in sums of 128 bits, whatever its terms.
fn open_wide(edges: &[Cut], at: &[u32], costs: &Costs, penalty: f64, worth: &impl Fn(usize, &[u32], &mut [f64])) -> Segmentation {
    let end = at.len() - 1;
    let cut = cut_costs(edges);
    // Backwards over nodes: the best way to go on from each, what it costs to begin there included, and the next node on it. The first of
    // equals is the smallest next cut.
    let mut best = vec![Cost::default(); end + 1];
    let mut next = vec![0_u32; end + 1];
    for node in (0..end).rev() {
        let mut chosen: Option<(Cost, usize)> = None;
        for to in node + 1..=reach(at, node, costs.limits.max, node + 1) {
            let len = at[to] - at[node];
            let mut cost = costs.chunk(len).plus(best[to]);
            if node > 0 {
                cost.value -= fixed(one(worth, node - 1, len) - penalty);
            }
            if chosen.is_none_or(|(c, _)| cost < c) {
                chosen = Some((cost, to));
            }
        }
        if let Some((cost, to)) = chosen {
            best[node] = if node > 0 { cost.plus(cut[node - 1]) } else { cost };
            next[node] = to as u32;
        }
    }
    finish(best[0], walk(end, |node| next[node]))
}

/// The cuts on the way from node to node.
fn walk(end: usize, next: impl Fn(usize) -> u32) -> Vec<usize> {
    let mut cuts = Vec::new();
    let mut node = next(0) as usize;
    while node < end {
        cuts.push(node - 1);
        node = next(node) as usize;
    }
    cuts
}

/// The best ways to go on from a node, lane by lane.
#[derive(Clone, Copy)]
struct Lanes<const L: usize> {
    value: [i64; L],
    cuts: [u32; L],
    next: [u32; L],
}

/// Tokens over, tokens under and fallback cuts as one number that is ordered as they are; sums of it are sums of each.
fn counts(over: u32, under: u32, fallback: u32) -> u128 {
    u128::from(over) << 96 | u128::from(under) << 32 | u128::from(fallback)
}

/// What the program in lanes solves. What limits count does not depend on the penalty, so it is settled once for all of them, and only the ways that are best
/// by it are compared by value.
struct Problem<'a, W, const L: usize> {
    edges: &'a [Cut],
    at: &'a [u32],
    limits: &'a Limits,
    penalties: &'a [[f64; L]],
    worth: &'a W,
}

impl<W: Fn(usize, &[u32], &mut [f64]), const L: usize> Problem<'_, W, L> {
    /// In sums of 64 bits; `None` if the terms are too large.
    fn solve(&self) -> Option<Vec<Segmentation>> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what the function is compiled for.
            #[allow(unsafe_code)]
            return unsafe { self.solve_avx2() };
        }
        self.solve_any()
    }

    /// The same code with longer vectors: no operation is another, so no bit is.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn solve_avx2(&self) -> Option<Vec<Segmentation>> {
        self.solve_any()
    }

    #[inline(always)]
    fn solve_any(&self) -> Option<Vec<Segmentation>> {
        let Self { edges, at, limits, penalties, worth } = *self;
        let end = at.len() - 1;
        let length = |len: u32| narrow(limits.length_term(len));
        let longest = limits.max.min(at[end]);
        // Of lengths between two others the term is below the larger one's.
        let is_small = |len: u32| limits.length_term(len) < LARGEST_TERM;
        if !is_small(0) || !is_small(longest) || penalties.iter().flatten().any(|p| p.abs() >= LARGEST_TERM) {
            return None;
        }
        let lengths: Vec<i64> = (0..=longest).map(length).collect();
        let of_length = |len: u32| counts(len.saturating_sub(limits.max), limits.min.saturating_sub(len), 0);
        // What limits count from each node on, and the nearest node behind the one at hand of which they count anything.
        let (mut limited, mut nearest) = (vec![0_u128; end + 1], end + 1);
        let mut best = vec![vec![Lanes { value: [0; L], cuts: [0; L], next: [0; L] }; end + 1]; penalties.len()];
        // Of each way from the node at hand: tokens, what they cost, what the cut is worth, and that less the penalties, in multiples of 2^-32.
        let (mut lens, mut costs) = (Vec::with_capacity(WAYS), Vec::with_capacity(WAYS));
        let (mut worths, mut earned) = (Vec::with_capacity(WAYS), Vec::with_capacity(WAYS));
        let mut last = end;
        for node in (0..end).rev() {
            let here = at[node];
            while last > node + 1 && at[last] - here > limits.max {
                last -= 1;
            }
            let (mut first, mut least) = (node + 1, 0);
            let farthest = at[last] - here;
            let unlimited = nearest > last && (limits.min..=limits.max).contains(&farthest);
            if unlimited {
                first += at[first..].iter().take_while(|&&to| to - here < limits.min).count();
            } else {
                least = (first..=last).map(|to| limited[to] + of_length(at[to] - here)).min().unwrap_or_default();
            }
            lens.clear();
            lens.extend(at[first..=last].iter().map(|to| to - here));
            costs.clear();
            if farthest > limits.max {
                if !is_small(farthest) {
                    return None;
                }
                costs.push(length(farthest));
            } else if unlimited {
                costs.extend(lens.iter().map(|&len| lengths[len as usize]));
            } else {
                let cost = |(&len, &rest): (&u32, &u128)| lengths[len as usize] + if rest + of_length(len) == least { 0 } else { NEVER };
                costs.extend(lens.iter().zip(&limited[first..]).map(cost));
            }
            worths.clear();
            worths.resize(lens.len(), 0.0);
            if node > 0 {
                worth(node - 1, &lens, &mut worths);
            }
            let mut sound = worths.iter().fold(true, |sound, worth| sound & (worth.abs() < LARGEST_TERM));
            for (best, penalties) in best.iter_mut().zip(penalties) {
                let (before, behind) = best.split_at_mut(first);
                earned.clear();
                match node {
                    0 => earned.resize(costs.len(), [0; L]),
                    _ => earned.extend(worths.iter().map(|worth| penalties.map(|penalty| narrow(worth - penalty)))),
                }
                before[node] = best_way(first, behind, &costs, &earned);
                before[node].cuts.iter_mut().for_each(|cuts| *cuts += u32::from(node > 0));
                sound &= before[node].value.iter().all(|value| value.abs() < NEVER / 2);
            }
            if !sound {
                return None;
            }
            limited[node] = least + counts(0, 0, u32::from(node > 0 && edges[node - 1].utility.is_none()));
            nearest = if limited[node] > 0 { node } else { nearest };
        }
        let (over, under, fallback) = ((limited[0] >> 96) as u64, (limited[0] >> 32) as u64, limited[0] as u32);
        let cost = Cost { over, under, fallback, ..Cost::default() };
        let lane = |i: usize| finish(cost, walk(end, |node| best[i / L][node].next[i % L]));
        Some((0..penalties.len() * L).map(lane).collect())
    }
}

/// The ways of least cost, then of fewest cuts, lane by lane; of equals the first. Way `w` goes to node `first + w`, whose best is `behind[w]`.
#[inline(always)]
fn best_way<const L: usize>(first: usize, behind: &[Lanes<L>], costs: &[i64], earned: &[[i64; L]]) -> Lanes<L> {
    let mut chosen = Lanes { value: [i64::MAX; L], cuts: [u32::MAX; L], next: [0; L] };
    for ((to, rest), (cost, earned)) in (first as u32..).zip(behind).zip(costs.iter().zip(earned)) {
        for (lane, earned) in earned.iter().enumerate() {
            let value = cost + rest.value[lane] - earned;
            let better = value < chosen.value[lane] || (value == chosen.value[lane] && rest.cuts[lane] < chosen.cuts[lane]);
            chosen.value[lane] = if better { value } else { chosen.value[lane] };
            chosen.cuts[lane] = if better { rest.cuts[lane] } else { chosen.cuts[lane] };
            chosen.next[lane] = if better { to } else { chosen.next[lane] };
        }
    }
    chosen
}

/// [`fixed`] of a term below [`LARGEST_TERM`] in amount; some number of a larger one.
#[inline(always)]
fn narrow(term: f64) -> i64 {
    // Floats around 1.5 * 2^52 are integers: adding it rounds to the nearest, and leaves the integer in the low bits. Rounding down is taking one off where
    // that was upwards.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    let scaled = term * 4_294_967_296.0 + 0.5;
    let shifted = scaled + SHIFT;
    let nearest = (shifted.to_bits() as i64).wrapping_sub(SHIFT.to_bits() as i64);
    nearest.wrapping_sub(i64::from(shifted - SHIFT > scaled))
}

/// Fixed-count segmentation: [`open_count`] with exactly `count` chunks and rho = 0 (paper equation 4).
///
/// # Errors
/// [`SegmentError::InfeasibleCount`] if no choice of edges gives that many chunks, [`SegmentError::TooLarge`] if the table of
/// `count` x `edges` entries would be too large.
pub fn fixed_count(edges: &[Cut], tokens: u32, limits: &Limits, count: u32) -> Result<Segmentation, SegmentError> {
    let gains = utilities(edges);
    fixed_chunks(edges, tokens, limits, count, |edge, _| gains[edge])
}

fn fixed_chunks(
    edges: &[Cut],
    tokens: u32,
    limits: &Limits,
    count: u32,
    gain: impl Fn(usize, u32) -> i128,
) -> Result<Segmentation, SegmentError> {
    let at = nodes(edges, tokens);
    let end = at.len() - 1;
    let most = end as u32;
    let mut least = 0;
    let mut node = 0;
    while node < end {
        node = reach(&at, node, limits.max, node + 1);
        least += 1;
    }
    if count < least || count > most {
        return Err(SegmentError::InfeasibleCount { count, least, most, nearest: count.clamp(least, most) });
    }
    let rows = count as usize;
    if rows.saturating_mul(end + 1) > MAX_TABLE {
        return Err(SegmentError::TooLarge { count, edges: edges.len() });
    }
    let costs = Costs::new(*limits, tokens);
    let cut = cut_costs(edges);

    // best[node]: the cheapest way to finish from node with k chunks; next[k - 1][node]: the node it goes to first.
    let mut best: Vec<Option<Cost>> = vec![None; end + 1];
    best[end] = Some(Cost::default());
    let mut next = vec![0_u32; rows * (end + 1)];
    for k in 0..rows {
        let mut now: Vec<Option<Cost>> = vec![None; end + 1];
        let mut last = end;
        for node in (0..end).rev() {
            while last > node + 1 && at[last] - at[node] > limits.max {
                last -= 1;
            }
            for to in node + 1..=last {
                let Some(rest) = best[to] else { continue };
                let len = at[to] - at[node];
                let mut cost = costs.chunk(len).plus(rest);
                if node > 0 {
                    cost = cost.plus(cut[node - 1]);
                    cost.value -= gain(node - 1, len);
                }
                if now[node].is_none_or(|c| cost.cmp(&c) == Ordering::Less) {
                    now[node] = Some(cost);
                    next[k * (end + 1) + node] = to as u32;
                }
            }
        }
        best = now;
    }
    let mut cuts = Vec::new();
    let mut node = 0;
    for k in (0..rows).rev() {
        node = next[k * (end + 1) + node] as usize;
        if node < end {
            cuts.push(node - 1);
        }
    }
    Ok(finish(best[0].unwrap_or_default(), cuts))
}

fn finish(cost: Cost, cuts: Vec<usize>) -> Segmentation {
    Segmentation { cuts, tokens_over: cost.over, tokens_under: cost.under, fallback_cuts: cost.fallback }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn each(of: impl Fn(usize, u32) -> f64) -> impl Fn(usize, &[u32], &mut [f64]) {
        move |edge, lens, out| out.iter_mut().zip(lens).for_each(|(out, &len)| *out = of(edge, len))
    }

    /// Every choice of cuts that obeys the predecessor rule, scored term by term as the design states it.
    fn brute_force(
        edges: &[Cut],
        tokens: u32,
        limits: &Limits,
        count: Option<usize>,
        gain: impl Fn(usize, u32) -> f64,
    ) -> Option<Vec<usize>> {
        type Key = (u64, u64, u32, i128, usize);
        let mut found: Option<(Key, Vec<usize>)> = None;
        for mask in 0..1_u32 << edges.len() {
            let cuts: Vec<usize> = (0..edges.len()).filter(|i| mask >> i & 1 == 1).collect();
            if count.is_some_and(|k| cuts.len() + 1 != k) {
                continue;
            }
            let ends: Vec<u32> = std::iter::once(0).chain(cuts.iter().map(|&i| edges[i].token)).chain([tokens]).collect();
            let allowed = ends.windows(2).all(|w| w[1] - w[0] <= limits.max || edges.iter().all(|e| e.token <= w[0] || e.token >= w[1]));
            if !allowed {
                continue;
            }
            let (mut over, mut under, mut value) = (0, 0, 0_i128);
            for w in ends.windows(2) {
                let len = w[1] - w[0];
                over += u64::from(len.saturating_sub(limits.max));
                under += u64::from(limits.min.saturating_sub(len));
                let ratio = (f64::from(len) - f64::from(limits.target)) / f64::from(limits.target);
                value += (limits.length_weight * (ratio * ratio) * 2f64.powi(32) + 0.5).floor() as i128;
            }
            let fallback = cuts.iter().filter(|&&i| edges[i].utility.is_none()).count() as u32;
            for (&i, w) in cuts.iter().zip(ends[1..].windows(2)) {
                value -= (gain(i, w[1] - w[0]) * 2f64.powi(32) + 0.5).floor() as i128;
            }
            let key = ((over, under, fallback, value, cuts.len()), cuts);
            if found.as_ref().is_none_or(|f| key < *f) {
                found = Some(key);
            }
        }
        found.map(|f| f.1)
    }

    fn case() -> impl Strategy<Value = (Vec<Cut>, u32, Limits)> {
        let utility = prop_oneof![
            1 => Just(None),
            4 => (1u32..=8).prop_map(|i| Some(f64::from(i) / 8.0)),
        ];
        (proptest::collection::vec((1u32..14, utility), 0..10), 1u32..14, 1u32..12, 0u32..12, 0u32..20, prop_oneof![Just(0.0), 0.0..0.5f64])
            .prop_map(|(gaps, tail, target, min, extra, length_weight)| {
                let mut token = 0;
                let edges: Vec<Cut> = gaps
                    .into_iter()
                    .map(|(gap, utility)| {
                        token += gap;
                        Cut { token, utility }
                    })
                    .collect();
                (edges, token + tail, Limits { target, min, max: (min + extra).max(1), length_weight })
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn open_count_equals_brute_force((edges, tokens, limits) in case(), penalty in prop_oneof![Just(0.5), -0.5..1.5f64]) {
            let gain = |i: usize, _| edges[i].utility.unwrap_or(0.0) - penalty;
            let expected = brute_force(&edges, tokens, &limits, None, gain).unwrap();
            let found = open_count(&edges, tokens, &limits, penalty);
            prop_assert_eq!(&found.cuts, &expected);
            // The wide program, and every lane of many penalties, find the same.
            let (at, costs) = (nodes(&edges, tokens), Costs::new(limits, tokens));
            prop_assert_eq!(&open_wide(&edges, &at, &costs, penalty, &each(|i, _| edges[i].utility.unwrap_or(0.0))), &found);
            let many: Vec<f64> = (0..11).map(|i| penalty + f64::from(i - 5) / 8.0).collect();
            let all = open_counts(&edges, tokens, &limits, &many);
            prop_assert_eq!(&all[5], &found);
            for (&p, found) in many.iter().zip(&all) {
                prop_assert_eq!(found, &open_count(&edges, tokens, &limits, p));
            }
        }

        #[test]
        fn chunk_damage_equals_brute_force(
            (edges, tokens, limits) in case(),
            penalty in prop_oneof![Just(2.0), -1.0..8.0f64],
            table in proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), -1.0..5.0f64], 40),
            count in 1u32..13,
        ) {
            let damage = |edge: usize, len: u32| table[(edge * 13 + len as usize) % table.len()];
            let gain = |penalty: f64| {
                let edges = &edges;
                move |i: usize, len: u32| if edges[i].utility.is_some() { penalty - damage(i, len) } else { 0.0 }
            };
            let expected = brute_force(&edges, tokens, &limits, None, gain(penalty)).unwrap();
            prop_assert_eq!(&open_damage(&edges, tokens, &limits, penalty, each(damage)).cuts, &expected);
            let all = open_damages(&edges, tokens, &limits, &[penalty + 1.0, penalty, penalty / 2.0], each(damage));
            prop_assert_eq!(&all[1].cuts, &expected);
            prop_assert_eq!(&all[0], &open_damage(&edges, tokens, &limits, penalty + 1.0, each(damage)));
            let expected = brute_force(&edges, tokens, &limits, Some(count as usize), gain(0.0));
            prop_assert_eq!(fixed_damage(&edges, tokens, &limits, count, each(damage)).ok().map(|s| s.cuts), expected);
        }

        #[test]
        fn fixed_count_equals_brute_force((edges, tokens, limits) in case(), count in 1u32..13) {
            let gain = |i: usize, _| edges[i].utility.unwrap_or(0.0);
            let expected = brute_force(&edges, tokens, &limits, Some(count as usize), gain);
            match fixed_count(&edges, tokens, &limits, count) {
                Ok(got) => prop_assert_eq!(Some(got.cuts), expected),
                Err(SegmentError::InfeasibleCount { nearest, .. }) => {
                    prop_assert_eq!(expected, None);
                    // The count it names works, and no count between does.
                    prop_assert!(fixed_count(&edges, tokens, &limits, nearest).is_ok());
                    let (low, high) = (nearest.min(count), nearest.max(count));
                    for between in low + 1..high {
                        prop_assert!(fixed_count(&edges, tokens, &limits, between).is_err());
                    }
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }

    #[test]
    fn relaxed_only_where_a_limit_gave_way() {
        let limits = Limits { target: 10, min: 5, max: 20, length_weight: 0.02 };
        assert!(!open_count(&[], 3, &limits, 0.5).limits_relaxed(), "a document shorter than Lmin is one chunk");
        assert!(open_count(&[], 21, &limits, 0.5).limits_relaxed(), "nothing to cut at");
        let fallback = [Cut { token: 11, utility: None }];
        let got = open_count(&fallback, 22, &limits, 0.5);
        assert_eq!((got.cuts.len(), got.limits_relaxed()), (1, true));
        let fine = open_count(&[Cut { token: 11, utility: Some(1.0) }], 22, &limits, 0.5);
        assert!(!fine.limits_relaxed());
    }

    #[test]
    fn terms_too_large_for_64_bits_are_summed_in_128() {
        let limits = Limits { target: 10, min: 0, max: 100, length_weight: 0.0 };
        let edges: Vec<Cut> = [5, 10, 15].map(|token| Cut { token, utility: Some(0.5) }).to_vec();
        let damage = |i: usize, _| if i == 1 { -4e9 } else { 4e9 };
        assert_eq!(open_damage(&edges, 20, &limits, 1.0, each(damage)).cuts, [1]);
        assert_eq!(open_damages(&edges, 20, &limits, &[1.0, 9e9], each(damage))[1].cuts, [0, 1, 2]);
    }

    #[test]
    fn ties_go_to_fewer_cuts_then_to_the_smallest_list() {
        let limits = Limits { target: 10, min: 0, max: 100, length_weight: 0.0 };
        let edges: Vec<Cut> = [5, 10, 15].map(|token| Cut { token, utility: Some(0.5) }).to_vec();
        assert!(open_count(&edges, 20, &limits, 0.5).cuts.is_empty());
        assert_eq!(fixed_count(&edges, 20, &limits, 3).unwrap().cuts, [0, 1]);
    }
}
