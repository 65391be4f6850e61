//! From texts to scored documents: hash, look up, and only for misses tokenize, score and write to the cache.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::stream::{self, StreamExt};
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use super::RunError;
use super::spec::{CacheMode, Layer, OnMiss, Pipeline, PositionsWord, Precision as PrecisionWord, ReadoutWord, SpecError};
use super::utility::{ReadoutCurves, Recipe};
use crate::cache::{
    Namespace, NamespaceId, NoStore, Records, ScoreStore, SledStore, decode_curves, decode_edges, encode_curves, encode_edges,
};
use crate::io::{SourceBatch, TextCell};
use crate::model::ops::{Device, Precision};
use crate::model::{self, Encoder, EncoderIdentity, Identity, Load, ModelError, ModelPath, Tap};
use crate::score::{
    Curves, Document, EMBED_TOKENS, EmbeddingBoundary, Engine, EngineOptions, EngineStats, Knots, PROMPT_REVISION, Passive, Positions,
    Prefix, Readout, Readouts, ScoreError, ScoreSpec, Stage, kernel_revision, reach, sides,
};
use crate::segment::Limits;
use crate::text::{Edge, EdgePolicy, Edges, SEGMENTER_VERSION, TOKENIZERS_VERSION, Tokenizer, Tokens, find_edges};

/// Documents of one batch that are tokenized and scored at once.
const IN_FLIGHT: usize = 32;

/// Edges that are embedded in one go: between them a run can be stopped.
const EMBED_AT_ONCE: usize = 256;

/// A namespace that can serve a request, and, if its records go further in one stage, their window.
type Serving = (NamespaceId, Option<u32>);

/// A document with its edges, scored or found to need no scores.
#[derive(Debug, Clone)]
pub struct Scored {
    /// blake3 of the text.
    pub hash: blake3::Hash,
    /// Tokens of the document.
    pub tokens: u32,
    /// Its edges.
    pub edges: Vec<Edge>,
    /// The number of each edge whose percentile is its utility; NaN for fallback edges and those without a score. `None` if the document
    /// could not be cut anyway.
    pub scores: Option<Vec<f32>>,
    /// The utility of each edge; NaN as in `scores`.
    pub utilities: Vec<f64>,
    /// Where several readouts are scored, the score of each edge by each of them, in the pipeline's order.
    pub(super) by_readout: Vec<Vec<f32>>,
    /// The curves of each readout, in the pipeline's order.
    pub(super) curves: Vec<ReadoutCurves>,
}

impl Scored {
    /// A document with a score and a utility for each candidate, whatever they are.
    pub(super) fn of_scores(hash: blake3::Hash, edges: Edges, scores: &[f32], utilities: &[f64]) -> Self {
        let (scores, utilities) = (spread(&edges, scores, f32::NAN), spread(&edges, utilities, f64::NAN));
        let Edges { tokens, edges } = edges;
        Self { hash, tokens, edges, scores: Some(scores), utilities, by_readout: Vec::new(), curves: Vec::new() }
    }

    /// Judges its edges by another recipe, from the curves that it has.
    pub(super) fn judge_by(&mut self, recipe: &Recipe) {
        let edges = Edges { tokens: self.tokens, edges: std::mem::take(&mut self.edges) };
        let (scores, utilities) = recipe.combine(&self.curves, &tokens_after(&edges));
        self.scores = Some(spread(&edges, &scores, f32::NAN));
        self.utilities = spread(&edges, &utilities, f64::NAN);
        self.edges = edges.edges;
    }
}

/// Values of candidates, spread over all edges.
fn spread<T: Copy>(edges: &Edges, values: &[T], none: T) -> Vec<T> {
    let mut values = values.iter();
    edges.edges.iter().map(|e| if e.is_candidate() { values.next().copied().unwrap_or(none) } else { none }).collect()
}

/// What a row turned out to be.
#[derive(Debug, Clone)]
pub enum DocState {
    /// Null text.
    Null,
    /// Empty text.
    Empty,
    /// Unusable, and why.
    Bad(String),
    /// Not in the cache, under `cache.on_miss = "skip"`.
    NotCached,
    /// A document.
    Ready(Box<Scored>),
}

/// When a document needs no scores.
#[derive(Debug, Clone, Copy)]
pub enum Need {
    /// Scores of every document.
    All,
    /// None if no limits could cut it: fewer than 2 Lmin and at most Lmax tokens.
    Cuttable(Limits),
}

impl Need {
    fn scores(&self, tokens: u32) -> bool {
        match self {
            Self::All => true,
            Self::Cuttable(limits) => tokens >= limits.min.saturating_mul(2) || tokens > limits.max,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) from_cache: AtomicU64,
    pub(super) scored: AtomicU64,
    pub(super) not_needed: AtomicU64,
    pub(super) tokens: AtomicU64,
    pub(super) candidates: AtomicU64,
    pub(super) model_loaded: AtomicBool,
    pub(super) tokenizer_loaded: AtomicBool,
    pub(super) lookup_ns: AtomicU64,
    pub(super) tokenize_ns: AtomicU64,
}

impl Counters {
    /// Forgets the documents of a first pass over the data but for those scored, whose number it returns.
    pub(super) fn forget(&self) -> u64 {
        for counter in [&self.from_cache, &self.not_needed, &self.tokens, &self.candidates] {
            counter.store(0, Ordering::Relaxed);
        }
        self.scored.load(Ordering::Relaxed)
    }
}

/// Gives documents their scores. Loads tokenizer and model on the first miss, so that a warm run loads neither.
pub struct Scorer {
    model: ModelPath,
    identity: Identity,
    policy: EdgePolicy,
    settings: ScoreSettings,
    on_miss: OnMiss,
    options: EngineOptions,
    store: Arc<dyn ScoreStore>,
    edges_namespace: NamespaceId,
    /// For each readout the namespaces that can serve a request; the one written to comes first.
    served_by: Vec<(Readout, Vec<Serving>)>,
    /// All namespaces of a look-up: edges first, then those of `served_by`.
    wanted: Vec<NamespaceId>,
    keys: Vec<blake3::Hash>,
    recipe: Recipe,
    /// Of the window.
    knots: Knots,
    tokenizer: OnceCell<Arc<Tokenizer>>,
    engine: OnceCell<Arc<Engine>>,
    encoder: Option<(PathBuf, EncoderIdentity)>,
    boundary: OnceCell<Arc<EmbeddingBoundary>>,
    /// One gate per text that is being scored: copies in other batches wait there and then find it in the cache.
    gates: Mutex<HashMap<blake3::Hash, Arc<tokio::sync::Mutex<()>>>>,
    /// One per thread, for batches that are looked up and cut.
    turns: Arc<Semaphore>,
    pub(super) counters: Counters,
}

/// The score table with model-dependent values resolved, the reset prefix still in words.
#[derive(Debug, Clone)]
struct ScoreSettings {
    stages: Vec<Stage>,
    window: u32,
    skip: u32,
    readouts: Readouts,
    positions: Positions,
    prefix: PrefixWords,
    bos: Option<u32>,
    context: u32,
    device: Device,
    precision: Precision,
}

impl ScoreSettings {
    /// `[[8,0.4],[128]]`.
    fn stage_words(&self) -> String {
        let early = self.stages.iter().map(|s| format!("[{},{}],", s.horizon, s.keep)).collect::<String>();
        format!("[{early}[{}]]", self.window)
    }

    fn spec(&self, prefix: Prefix) -> ScoreSpec {
        let Self { window, skip, readouts, positions, bos, context, .. } = *self;
        ScoreSpec { stages: self.stages.clone(), window, skip, readouts, positions, prefix, bos, context }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PrefixWords {
    None,
    Id(u32),
    Token(String),
    Separator(String),
    Local(u32),
}

impl Scorer {
    /// Finds the model, opens the cache and resolves the settings. Loads no weights.
    ///
    /// # Errors
    /// [`RunError`] if the model is missing, the cache is locked, or settings do not fit the model.
    pub fn new(pipeline: &Pipeline, models: &std::path::Path) -> Result<Self, RunError> {
        Self::with_store(pipeline, models, |path| Ok(Arc::new(SledStore::open(path, pipeline.cache.max_bytes)?)))
    }

    /// The same, to look documents up alone: the cache is not made if there is none, and nothing is written to it.
    pub(super) fn to_look(pipeline: &Pipeline, models: &std::path::Path) -> Result<Self, RunError> {
        Self::with_store(pipeline, models, |path| match SledStore::open_to_read(path)? {
            Some(store) => Ok(Arc::new(store)),
            None => Ok(Arc::new(NoStore)),
        })
    }

    fn with_store(
        pipeline: &Pipeline,
        models: &std::path::Path,
        open: impl FnOnce(&std::path::Path) -> Result<Arc<dyn ScoreStore>, RunError>,
    ) -> Result<Self, RunError> {
        let model = model::resolve(&pipeline.model.name, models)?;
        let identity = model::identity(&model.path, &models.join(".identities"))?;
        if identity.tokenizer_hash.is_empty() {
            return Err(ModelError::Checkpoint {
                path: model.path.display().to_string(),
                reason: "has no tokenizer.json; put the model's tokenizer beside its weights".into(),
            }
            .into());
        }
        let settings = resolve_settings(pipeline, &identity, &model)?;
        let encoder = if pipeline.score.readouts.contains(&ReadoutWord::Embed) {
            let found = model::resolve(&pipeline.score.encoder, models)?;
            let identity = model::encoder_identity(&found.path, &models.join(".identities"))?;
            Some((found.path, identity))
        } else {
            None
        };
        let policy = EdgePolicy { grid: pipeline.edges.grid, sentence_ends: pipeline.edges.sentence_ends };
        let path = cache_path(pipeline);
        let store: Arc<dyn ScoreStore> = match pipeline.cache.mode {
            CacheMode::On => open(&path)?,
            CacheMode::Off => Arc::new(NoStore),
        };
        let edges = Namespace::new("edges", edge_fields(&identity, policy));
        let known = store.namespaces();
        let edges_namespace = store.namespace(&edges)?;
        let (mut served_by, mut wanted, mut keys, mut is_new) = (Vec::new(), vec![edges_namespace], vec![edges.hash()], false);
        for readout in pipeline.score.readouts.iter().map(|r| r.readout()) {
            let fields = match (readout, &encoder) {
                (Readout::Embed, Some((_, encoder))) => embed_fields(&identity, policy, encoder),
                _ => score_fields(&identity, policy, &settings, readout),
            };
            let scores = Namespace::new(readout.as_str(), fields);
            is_new |= !known.iter().any(|(_, n)| *n == scores);
            let mut serving = vec![(store.namespace(&scores)?, None)];
            serving.extend(known.iter().filter_map(|(id, n)| Some((*id, Some(longer_window(n, &scores, &settings)?)))));
            wanted.extend(serving.iter().map(|s| s.0));
            keys.push(scores.hash());
            served_by.push((readout, serving));
        }
        for id in std::iter::once(edges_namespace).chain(served_by.iter().map(|(_, serving)| serving[0].0)) {
            store.used(id, &model.name)?;
        }
        let threads = pipeline
            .model
            .threads
            .map_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get), |threads| threads as usize);
        let knots = Knots::new(settings.window, settings.skip);
        let scorer = Self {
            knots,
            model,
            identity,
            policy,
            settings,
            on_miss: pipeline.cache.on_miss,
            options: EngineOptions {
                threads,
                batch_tokens: pipeline.score.batch_tokens as usize,
                stage_memory: usize::try_from(pipeline.score.stage_memory).unwrap_or(usize::MAX),
            },
            store,
            edges_namespace,
            wanted,
            served_by,
            keys,
            recipe: Recipe::new(pipeline),
            tokenizer: OnceCell::new(),
            engine: OnceCell::new(),
            encoder,
            boundary: OnceCell::new(),
            gates: Mutex::default(),
            turns: Arc::new(Semaphore::new(threads.max(1))),
            counters: Counters::default(),
        };
        // Settings that were used before are known to be sound; new ones are checked now rather than at the first document.
        if is_new
            && scorer.settings.readouts != Readouts::default()
            && matches!(scorer.settings.prefix, PrefixWords::Token(_) | PrefixWords::Separator(_))
        {
            let tokenizer = model::load_tokenizer(&scorer.model.path)?;
            scorer.score_spec(&tokenizer)?.validate()?;
        }
        Ok(scorer)
    }

    /// Hashes of the namespaces: everything that can change an edge or a score.
    pub(super) fn keys(&self) -> &[blake3::Hash] {
        &self.keys
    }

    /// The readouts, in the pipeline's order.
    pub(super) fn readouts(&self) -> impl Iterator<Item = Readout> + '_ {
        self.served_by.iter().map(|s| s.0)
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(super) fn model_name(&self) -> &str {
        &self.model.name
    }

    /// The score settings in words, for file metadata.
    pub(super) fn score_words(&self) -> String {
        let fields = self.readouts().flat_map(|readout| match (readout, &self.encoder) {
            (Readout::Embed, Some((_, encoder))) => embed_fields(&self.identity, self.policy, encoder),
            _ => score_fields(&self.identity, self.policy, &self.settings, readout),
        });
        let names: Vec<_> = self.readouts().map(Readout::as_str).collect();
        let fields: std::collections::BTreeMap<_, _> = fields.chain([("readouts", names.join(","))]).collect();
        serde_json::to_string(&fields).unwrap_or_default()
    }

    /// Which edges are candidates.
    pub(super) fn policy(&self) -> EdgePolicy {
        self.policy
    }

    /// The model with its head, for scores that remove no prefix.
    pub(super) async fn passive(&self) -> Result<Passive, RunError> {
        let tokenizer = self.tokenizer().await?;
        let (spec, path) = (self.score_spec(&tokenizer)?, self.model.path.clone());
        let (device, precision) = (self.settings.device, self.settings.precision);
        let load = Load { depth: usize::MAX, extra: 0, head: true, device, precision };
        blocking(move || Ok::<_, RunError>(Passive::new(model::load_trunk(&path, load)?, spec)?)).await?
    }

    /// Where the answers of an instruction model are kept.
    pub(super) fn prompted_by(&self, model: &Identity) -> Namespace {
        let asked = [
            ("prompt_weights", model.weights_hash.clone()),
            ("prompt_tokenizer", model.tokenizer_hash.clone()),
            ("prompt_revision", PROMPT_REVISION.to_string()),
        ];
        Namespace::new("prompted", edge_fields(&self.identity, self.policy).into_iter().chain(asked))
    }

    /// What the engine is asked for.
    pub(super) async fn spec(&self) -> Result<ScoreSpec, RunError> {
        self.score_spec(&*self.tokenizer().await?)
    }

    pub(super) fn threads(&self) -> usize {
        self.options.threads
    }

    pub(super) fn store(&self) -> &dyn ScoreStore {
        self.store.as_ref()
    }

    pub(super) fn encoder_loaded(&self) -> bool {
        self.boundary.initialized()
    }

    /// What the engine has done so far; none if no model was loaded.
    #[must_use]
    pub fn engine_stats(&self) -> Option<EngineStats> {
        self.engine.get().map(|e| e.stats())
    }

    fn score_spec(&self, tokenizer: &Tokenizer) -> Result<ScoreSpec, RunError> {
        let s = &self.settings;
        let prefix = match &s.prefix {
            PrefixWords::None => Prefix::Tokens(Vec::new()),
            PrefixWords::Id(id) => Prefix::Tokens(vec![*id]),
            PrefixWords::Token(token) => Prefix::Tokens(vec![tokenizer.token_id(token).map_err(|e| value("score.reset_prefix", e))?]),
            PrefixWords::Separator(text) => {
                let ids = tokenizer.encode(text).map_err(|e| value("score.reset_prefix", e))?.ids;
                if ids.is_empty() {
                    return Err(value("score.reset_prefix", format!("the separator {text:?} has no tokens")));
                }
                Prefix::Tokens(ids)
            }
            PrefixWords::Local(p) => Prefix::Local(*p),
        };
        Ok(s.spec(prefix))
    }

    pub(super) async fn tokenizer(&self) -> Result<Arc<Tokenizer>, RunError> {
        let load = || async {
            self.counters.tokenizer_loaded.store(true, Ordering::Relaxed);
            let path = self.model.path.clone();
            let tokenizer = blocking(move || model::load_tokenizer(&path)).await??;
            Ok::<_, RunError>(Arc::new(tokenizer))
        };
        self.tokenizer.get_or_try_init(load).await.cloned()
    }

    pub(super) async fn engine(&self) -> Result<Arc<Engine>, RunError> {
        let load = || async {
            let tokenizer = self.tokenizer().await?;
            let spec = self.score_spec(&tokenizer)?;
            self.counters.model_loaded.store(true, Ordering::Relaxed);
            tracing::info!(event = "model_loading", model = self.model.name, "loading the model");
            let (path, options, device, precision) = (self.model.path.clone(), self.options, self.settings.device, self.settings.precision);
            let engine = blocking(move || {
                let extra = match &spec.prefix {
                    Prefix::Tokens(tokens) => tokens.len(),
                    Prefix::Local(p) => *p as usize,
                };
                let load = Load { depth: spec.readouts.depth(), extra, head: spec.readouts.need_head(), device, precision };
                let trunk = model::load_trunk(&path, load)?;
                let (tokens, rows) = (tokenizer.vocab_size(), trunk.shape().vocab);
                if tokens > rows {
                    let reason = format!("its tokenizer has {tokens} tokens, its embedding {rows} rows: they belong to different models");
                    return Err(ScoreError::from(ModelError::Checkpoint { path: path.display().to_string(), reason }));
                }
                Engine::new(trunk, spec, options)
            })
            .await??;
            Ok::<_, RunError>(Arc::new(engine))
        };
        self.engine.get_or_try_init(load).await.cloned()
    }

    /// What each row of a batch is. The rows keep their order.
    ///
    /// # Errors
    /// [`RunError`] if the cache or the model fails; what concerns one document only is its [`DocState::Bad`].
    pub async fn resolve(self: &Arc<Self>, batch: &Arc<SourceBatch>, need: Need) -> Result<Vec<DocState>, RunError> {
        self.resolve_each(batch, need, |_, state| state, |states| states).await
    }

    /// What `each` makes of every row, by its place in the batch, and then `finish` of all of them in order. A document is let go of before the next is looked
    /// up, and if none must be scored everything happens on one thread: memory is not passed between threads, and is in their caches.
    pub(super) async fn resolve_each<T: Send + 'static, R: Send + 'static>(
        self: &Arc<Self>,
        batch: &Arc<SourceBatch>,
        need: Need,
        each: impl Fn(usize, DocState) -> T + Send + Sync + 'static,
        finish: impl FnOnce(Vec<T>) -> R + Send + 'static,
    ) -> Result<R, RunError> {
        let (this, rows) = (Arc::clone(self), Arc::clone(batch));
        let turn = self.turn().await?;
        let known = blocking(move || {
            let _turn = turn;
            let mut known = Vec::with_capacity(rows.rows.len());
            for (place, text) in rows.texts().enumerate() {
                known.push(this.look_up(text, need)?.map(|state| each(place, state)));
            }
            if known.iter().any(Result::is_err) {
                return Ok::<_, RunError>(Err((known, each, finish)));
            }
            Ok(Ok(finish(known.into_iter().flatten().collect())))
        });
        let (known, each, finish) = match known.await?? {
            Ok(done) => return Ok(done),
            Err(rest) => rest,
        };

        let mut misses: HashMap<blake3::Hash, Vec<usize>> = HashMap::new();
        let mut order = Vec::new();
        for (i, state) in known.iter().enumerate() {
            if let Err(hash) = state {
                let same = misses.entry(*hash).or_default();
                if same.is_empty() {
                    order.push((*hash, i));
                }
                same.push(i);
            }
        }
        let mut states: HashMap<blake3::Hash, DocState> = HashMap::new();
        match self.on_miss {
            OnMiss::Error => {
                return Err(RunError::NotCached { row: batch.rows[order[0].1], documents: order.len() });
            }
            OnMiss::Skip => {}
            OnMiss::Score => {
                let found: Vec<_> = stream::iter(order)
                    .map(|(hash, i)| async move { Ok::<_, RunError>((hash, self.score_once(batch, i, hash, need).await?)) })
                    .buffered(IN_FLIGHT)
                    .collect()
                    .await;
                for result in found {
                    let (hash, state) = result?;
                    misses.get(&hash).into_iter().flatten().skip(1).for_each(|_| self.count_copy(&state));
                    states.insert(hash, state);
                }
            }
        }
        let turn = self.turn().await?;
        blocking(move || {
            let _turn = turn;
            let state = |hash| states.get(&hash).cloned().unwrap_or(DocState::NotCached);
            finish(known.into_iter().enumerate().map(|(place, known)| known.unwrap_or_else(|hash| each(place, state(hash)))).collect())
        })
        .await
    }

    /// Waits until a thread is free for a batch, first come, first served. Batches that shared threads would be ready all at once, and late.
    async fn turn(&self) -> Result<OwnedSemaphorePermit, RunError> {
        Arc::clone(&self.turns).acquire_owned().await.map_err(|e| RunError::Bug(e.to_string()))
    }

    /// Counts a copy of a document of the same batch, which was resolved once for all of them.
    fn count_copy(&self, state: &DocState) {
        let DocState::Ready(document) = state else { return };
        let counter = if document.scores.is_some() { &self.counters.from_cache } else { &self.counters.not_needed };
        counter.fetch_add(1, Ordering::Relaxed);
        self.count_size(document.tokens, document.scores.as_deref());
    }

    fn count_size(&self, tokens: u32, scores: Option<&[f32]>) {
        let candidates = scores.unwrap_or_default().iter().filter(|s| !s.is_nan()).count();
        self.counters.tokens.fetch_add(u64::from(tokens), Ordering::Relaxed);
        self.counters.candidates.fetch_add(candidates as u64, Ordering::Relaxed);
    }

    /// What is known of a row, or the hash of a text that must be scored.
    fn look_up(&self, text: TextCell<'_>, need: Need) -> Result<Result<DocState, blake3::Hash>, RunError> {
        let began = Instant::now();
        let state = match text {
            TextCell::Null => DocState::Null,
            TextCell::Bad(reason) => DocState::Bad(reason.to_owned()),
            TextCell::Text("") => DocState::Empty,
            TextCell::Text(text) => {
                let hash = blake3::hash(text.as_bytes());
                let found = self.look_up_text(hash, text, need)?;
                self.counters.lookup_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
                return Ok(found.ok_or(hash));
            }
        };
        Ok(Ok(state))
    }

    /// What the cache knows of a text, if it is enough.
    fn look_up_text(&self, hash: blake3::Hash, text: &str, need: Need) -> Result<Option<DocState>, RunError> {
        let records = self.store.lookup(&hash, &self.wanted)?;
        let Some(edges) = records.get(0).and_then(|bytes| decode_edges(bytes, text.len())) else { return Ok(None) };
        if !need.scores(edges.tokens) {
            self.counters.not_needed.fetch_add(1, Ordering::Relaxed);
            return Ok(Some(self.ready(hash, edges, None)));
        }
        Ok(self.served(&records, &edges).into_iter().collect::<Option<Vec<_>>>().map(|curves| {
            self.counters.from_cache.fetch_add(1, Ordering::Relaxed);
            self.ready(hash, edges, Some(curves))
        }))
    }

    /// For each readout the curves that the records of a look-up hold, if any does.
    fn served(&self, records: &Records, edges: &Edges) -> Vec<Option<ReadoutCurves>> {
        let mut next = 1;
        let after = tokens_after(edges);
        // Windows of another length may read a document of several segments from other ones.
        let one_segment = edges.tokens <= self.settings.context - u32::from(self.settings.bos.is_some());
        let of_readout = |(readout, serving): &(Readout, Vec<Serving>)| {
            let first = next;
            next += serving.len();
            serving.iter().enumerate().find_map(|(i, (_, longer))| {
                let curves = decode_curves(records.get(first + i)?, after.len())?;
                (longer.is_none() || one_segment).then(|| self.fitted(*readout, curves, *longer, &after))
            })
        };
        self.served_by.iter().map(of_readout).collect()
    }

    /// Curves as the pipeline's stages give them: of those that go further (`longer` is their window) the rest is cut off.
    fn fitted(&self, readout: Readout, mut curves: Curves, longer: Option<u32>, after: &[u32]) -> ReadoutCurves {
        let s = &self.settings;
        if readout == Readout::Embed {
            return ReadoutCurves { readout, reach: vec![s.window; curves.len()], curves };
        }
        let reach = reach(&s.stages, s.window, &self.knots, &curves, after);
        if let Some(longer) = longer {
            let knots = Knots::new(longer, s.skip);
            let cut = |((curve, &reach), &after): ((&[f32], &u32), &u32)| {
                let kept = if reach < after.min(longer) { knots.kept(reach).min(curve.len()) } else { curve.len() };
                curve[..kept].to_vec()
            };
            curves = curves.iter().zip(&reach).zip(after).map(cut).collect();
        }
        ReadoutCurves { readout, curves, reach }
    }

    /// Scores a text that the cache lacked, unless a copy of it is being scored: then its scores are waited for.
    async fn score_once(
        self: &Arc<Self>,
        batch: &Arc<SourceBatch>,
        row: usize,
        hash: blake3::Hash,
        need: Need,
    ) -> Result<DocState, RunError> {
        let gate = Arc::clone(self.gates.lock().unwrap_or_else(PoisonError::into_inner).entry(hash).or_default());
        let guard = gate.lock().await;
        // A copy may have been scored since the batch was looked up, whether it was waited for or not.
        let known = match batch.text(row) {
            TextCell::Text(text) => self.look_up_text(hash, text, need)?,
            _ => None,
        };
        let state = match known {
            Some(state) => Ok(state),
            None => self.score_missing(batch, row, hash, need).await,
        };
        drop(guard);
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        // The map and this function hold it: nobody waits.
        if Arc::strong_count(&gate) == 2 {
            gates.remove(&hash);
        }
        drop(gates);
        state
    }

    fn ready(&self, hash: blake3::Hash, edges: Edges, curves: Option<Vec<ReadoutCurves>>) -> DocState {
        let after = tokens_after(&edges);
        let combined = curves.as_ref().map(|curves| self.recipe.combine(curves, &after));
        let (scores, utilities) = combined.map_or((None, Vec::new()), |(scores, utilities)| {
            (Some(spread(&edges, &scores, f32::NAN)), spread(&edges, &utilities, f64::NAN))
        });
        self.count_size(edges.tokens, scores.as_deref());
        let curves = curves.unwrap_or_default();
        let by_readout = if self.served_by.len() > 1 {
            curves.iter().map(|c| spread(&edges, &self.recipe.scores(c, self.settings.window, &after), f32::NAN)).collect()
        } else {
            Vec::new()
        };
        DocState::Ready(Box::new(Scored { hash, tokens: edges.tokens, edges: edges.edges, scores, utilities, by_readout, curves }))
    }

    async fn score_missing(
        self: &Arc<Self>,
        batch: &Arc<SourceBatch>,
        row: usize,
        hash: blake3::Hash,
        need: Need,
    ) -> Result<DocState, RunError> {
        let tokenizer = self.tokenizer().await?;
        let (this, rows) = (Arc::clone(self), Arc::clone(batch));
        let prepared = blocking(move || {
            let began = Instant::now();
            let TextCell::Text(text) = rows.text(row) else {
                return Ok((Tokens::default(), Edges::default()));
            };
            let tokens = tokenizer.encode(text)?;
            let edges = find_edges(text, &tokens, this.policy);
            this.counters.tokenize_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            Ok::<_, crate::text::TextError>((tokens, edges))
        })
        .await?;
        let (tokens, edges) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Ok(DocState::Bad(error.to_string())),
        };
        if !need.scores(edges.tokens) {
            let payload = encode_edges(&edges);
            self.store.insert(&hash, &[(self.edges_namespace, &payload)])?;
            self.counters.not_needed.fetch_add(1, Ordering::Relaxed);
            return Ok(self.ready(hash, edges, None));
        }
        let places: Vec<u32> = edges.edges.iter().filter(|e| e.is_candidate()).map(|e| e.token.0).collect();
        // What the cache already has is not written again.
        let found = self.store.lookup(&hash, &self.wanted)?;
        let known = self.served(&found, &edges);
        let missing = |embed: bool| self.served_by.iter().zip(&known).any(|((r, _), k)| k.is_none() && (*r == Readout::Embed) == embed);
        let embedded = if missing(true) { self.embed(batch, row, &tokens, &edges).await } else { Ok(Vec::new()) };
        let scored = match embedded {
            Ok(embedded) if missing(false) => {
                self.engine().await?.score(Document { ids: tokens.ids, edges: places }).await.map(|scored| (embedded, scored))
            }
            Ok(embedded) => Ok((embedded, Vec::new())),
            Err(RunError::Score(error)) => Err(error),
            Err(error) => return Err(error),
        };
        let (embedded, scored) = match scored {
            Ok(scored) => scored,
            Err(error @ ScoreError::NotFinite { .. }) => {
                return Ok(DocState::Bad(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let mut records = Vec::new();
        if found.get(0).is_none() {
            records.push((self.edges_namespace, encode_edges(&edges)));
        }
        let mut all = Vec::with_capacity(known.len());
        for ((readout, serving), known) in self.served_by.iter().zip(known) {
            let curves = match known {
                Some(known) => known,
                None => {
                    let curves: Curves = match readout {
                        Readout::Embed => embedded.iter().map(|&value| [value]).collect(),
                        _ => scored.iter().map(|curves| curves.get(*readout).iter().copied()).collect(),
                    };
                    records.push((serving[0].0, encode_curves(&curves)));
                    self.fitted(*readout, curves, None, &tokens_after(&edges))
                }
            };
            all.push(curves);
        }
        let records: Vec<(NamespaceId, &[u8])> = records.iter().map(|(id, payload)| (*id, payload.as_slice())).collect();
        self.store.insert(&hash, &records)?;
        self.counters.scored.fetch_add(1, Ordering::Relaxed);
        Ok(self.ready(hash, edges, Some(all)))
    }

    /// The embedding boundary of each candidate.
    async fn embed(&self, batch: &Arc<SourceBatch>, row: usize, tokens: &Tokens, edges: &Edges) -> Result<Vec<f32>, RunError> {
        let boundary = self.boundary().await?;
        let TextCell::Text(text) = batch.text(row) else { return Ok(Vec::new()) };
        let candidates: Vec<&Edge> = edges.edges.iter().filter(|e| e.is_candidate()).collect();
        let mut out = Vec::with_capacity(candidates.len());
        for some in candidates.chunks(EMBED_AT_ONCE) {
            let sides: Vec<_> = some.iter().map(|edge| sides(text, tokens, edge)).collect();
            let (boundary, rows) = (Arc::clone(&boundary), Arc::clone(batch));
            let found = blocking(move || match rows.text(row) {
                TextCell::Text(text) => boundary.scores(text, &sides),
                _ => Ok(Vec::new()),
            })
            .await?;
            out.extend(found.map_err(|error| match error {
                ScoreError::NotFinite { edge } => ScoreError::NotFinite { edge: some[edge as usize].token.0 },
                other => other,
            })?);
        }
        Ok(out)
    }

    pub(super) async fn boundary(&self) -> Result<Arc<EmbeddingBoundary>, RunError> {
        let load = || async {
            let Some((path, _)) = self.encoder.clone() else { return Err(RunError::Bug("no encoder".into())) };
            let threads = self.options.threads;
            tracing::info!(event = "encoder_loading", encoder = %path.display(), "loading the encoder");
            let boundary = blocking(move || {
                let encoder = Encoder::load(&path)?;
                EmbeddingBoundary::new(Arc::new(encoder), threads)
            });
            Ok(Arc::new(boundary.await??))
        };
        self.boundary.get_or_try_init(load).await.cloned()
    }
}

/// Where a pipeline's cache lies.
#[must_use]
pub fn cache_path(pipeline: &Pipeline) -> PathBuf {
    pipeline.cache.path.clone().unwrap_or_else(|| model::user_cache().join("scores"))
}

/// Runs blocking work off the executor.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, RunError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| RunError::Bug(e.to_string()))
}

fn value(key: &str, reason: impl std::fmt::Display) -> RunError {
    SpecError::Value { key: key.into(), reason: reason.to_string() }.into()
}

fn resolve_settings(pipeline: &Pipeline, identity: &Identity, model: &ModelPath) -> Result<ScoreSettings, RunError> {
    let score = &pipeline.score;
    let layers = identity.layers();
    let tap = match &score.layer {
        Layer::Number(k) => Tap::Layer(*k as usize),
        Layer::Word(word) if word == "final" => Tap::Final,
        Layer::Word(word) => {
            let share = word.strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok()).filter(|s| (0.0..=100.0).contains(s));
            match (share, word.parse::<usize>()) {
                (Some(share), _) => Tap::Layer((share / 100.0 * layers as f64).floor() as usize),
                (None, Ok(k)) => Tap::Layer(k),
                _ => {
                    return Err(value(
                        "score.layer",
                        format!("{word:?} is neither a block number, a share such as \"75%\", nor \"final\""),
                    ));
                }
            }
        }
    };
    if let Tap::Layer(k) = tap
        && k > layers
    {
        return Err(value("score.layer", format!("block {k} does not exist: {} has {layers}", model.name)));
    }
    let number = |text: &str| text.parse::<u32>().map_err(|_| value("score.reset_prefix", format!("{text:?} is no number of tokens")));
    let bos = || {
        identity
            .bos_token
            .ok_or_else(|| value("model.bos", format!("{} names no beginning-of-sequence token; use token:<special token>", model.name)))
    };
    let prefix = match score.reset_prefix.split_once(':') {
        None if score.reset_prefix == "none" => PrefixWords::None,
        None if score.reset_prefix == "bos" => PrefixWords::Id(bos()?),
        None if score.reset_prefix == "document" => match (model.document_token, identity.bos_token) {
            (Some(token), _) => PrefixWords::Token(token.to_owned()),
            (None, Some(id)) => PrefixWords::Id(id),
            (None, None) => PrefixWords::Token("<|endoftext|>".to_owned()),
        },
        Some(("token", token)) => PrefixWords::Token(token.to_owned()),
        Some(("separator", "")) => {
            return Err(value("score.reset_prefix", "the separator is empty; use \"none\""));
        }
        Some(("separator", text)) => PrefixWords::Separator(text.to_owned()),
        Some(("local", p)) => PrefixWords::Local(number(p)?),
        _ => {
            return Err(value(
                "score.reset_prefix",
                format!("{:?} is none of none, bos, document, token:<special token>, separator:<text>, local:<tokens>", score.reset_prefix),
            ));
        }
    };
    let has = |readout: Readout| score.readouts.iter().any(|r| r.readout() == readout);
    let device: Device = pipeline.model.device.parse().map_err(|reason: String| value("model.device", reason))?;
    let precision = match pipeline.model.precision {
        PrecisionWord::Auto | PrecisionWord::F32 => Precision::F32,
        _ if device != Device::Cpu => {
            return Err(value("model.precision", "\"bf16\" and \"int8\" are for the processor; accelerators multiply in f32"));
        }
        PrecisionWord::Bf16 => Precision::Bf16,
        PrecisionWord::Int8 => Precision::Int8,
    };
    let settings = ScoreSettings {
        stages: score.early_stages(),
        window: score.window(),
        skip: score.skip,
        readouts: Readouts { rr: has(Readout::Rr).then_some(tap), lr: has(Readout::Lr), kl: has(Readout::Kl) },
        positions: match score.positions {
            PositionsWord::Original => Positions::Original,
            PositionsWord::Reindexed => Positions::Reindexed,
        },
        prefix,
        bos: if pipeline.model.bos { Some(bos()?) } else { None },
        context: score.context.min(u32::try_from(identity.context()).unwrap_or(u32::MAX)),
        device,
        precision,
    };
    // What does not depend on the tokenizer is checked before any document is read.
    let prefix = match settings.prefix {
        PrefixWords::Local(p) => Prefix::Local(p),
        PrefixWords::None => Prefix::Tokens(Vec::new()),
        _ => Prefix::Tokens(vec![0]),
    };
    if settings.readouts != Readouts::default() {
        settings.spec(prefix).validate()?;
    }
    Ok(settings)
}

fn edge_fields(identity: &Identity, policy: EdgePolicy) -> Vec<(&'static str, String)> {
    vec![
        ("tokenizer", identity.tokenizer_hash.clone()),
        ("tokenizers_version", TOKENIZERS_VERSION.into()),
        ("segmenter", SEGMENTER_VERSION.into()),
        ("grid", policy.grid.to_string()),
        ("sentence_ends", policy.sentence_ends.to_string()),
        ("policy_revision", "2".into()),
    ]
}

/// What decides the embedding boundary.
fn embed_fields(identity: &Identity, policy: EdgePolicy, encoder: &EncoderIdentity) -> Vec<(&'static str, String)> {
    let mut fields = edge_fields(identity, policy);
    fields.extend([
        ("encoder_weights", encoder.weights_hash.clone()),
        ("encoder_config", encoder.config_hash.clone()),
        ("encoder_tokenizer", encoder.tokenizer_hash.clone()),
        ("encoder_pooling", encoder.pooling.clone()),
        ("encoder_max_tokens", encoder.max_tokens.to_string()),
        ("encoder_revision", "1".into()),
        ("encoder_tokens", EMBED_TOKENS.to_string()),
    ]);
    fields
}

fn score_fields(identity: &Identity, policy: EdgePolicy, s: &ScoreSettings, readout: Readout) -> Vec<(&'static str, String)> {
    let mut fields = edge_fields(identity, policy);
    fields.extend([
        ("weights", identity.weights_hash.clone()),
        ("config", identity.config_text()),
        ("architecture", identity.architecture.clone()),
        ("stages", s.stage_words()),
        ("skip", s.skip.to_string()),
        (
            "positions",
            match s.positions {
                Positions::Original => "original".into(),
                Positions::Reindexed => "reindexed".into(),
            },
        ),
        (
            "reset_prefix",
            match &s.prefix {
                PrefixWords::None => "none".into(),
                PrefixWords::Id(id) => format!("id:{id}"),
                PrefixWords::Token(token) => format!("token:{token}"),
                PrefixWords::Separator(text) => format!("separator:{text}"),
                PrefixWords::Local(p) => format!("local:{p}"),
            },
        ),
        ("context", s.context.to_string()),
        ("bos", s.bos.map_or("none".into(), |id| id.to_string())),
        ("precision", s.precision.as_str().into()),
        ("device", s.device.class().into()),
        ("kernel_revision", kernel_revision(s.precision).to_string()),
    ]);
    // Only RR depends on where states are read.
    if let (Readout::Rr, Some(tap)) = (readout, s.readouts.rr) {
        let layer = if let Tap::Layer(k) = tap { k.to_string() } else { "final".into() };
        fields.push(("layer", layer));
    }
    fields
}

/// The window of a one-stage namespace that differs from `wanted` only in running every candidate at least as far, if its curves hold the horizons.
fn longer_window(namespace: &Namespace, wanted: &Namespace, settings: &ScoreSettings) -> Option<u32> {
    if namespace.kind != wanted.kind || !settings.window.is_multiple_of(8) {
        return None;
    }
    let mut other = namespace.clone();
    let stages = other.fields.insert("stages".into(), wanted.fields.get("stages")?.clone())?;
    let longer: u32 = stages.strip_prefix("[[")?.strip_suffix("]]")?.parse().ok()?;
    (other == *wanted && namespace != wanted && longer >= settings.window).then_some(longer)
}

/// Tokens right of each candidate.
fn tokens_after(edges: &Edges) -> Vec<u32> {
    edges.edges.iter().filter(|e| e.is_candidate()).map(|e| edges.tokens - e.token.0).collect()
}
