//! [`Plan`]: the styles and layouts for the layers of a model.

use super::{PrepareModuleInputOutput, Style};

/// Path patterns, and the [`Style`]s of the modules and parameters that they match; see
/// [`parallelize`](super::parallelize).
///
/// ```
/// use burn_dtensor::parallel::{Plan, Style};
/// use burn_dtensor::placement::Placement::Shard;
///
/// // A transformer with sequence parallelism between the layers of its blocks.
/// let plan = Plan::new()
///     .with_style("embedding", Style::rowwise().with_output(Shard(1)))
///     .with_style("blocks.*.norm?", Style::sequence_parallel())
///     .with_style("blocks.*.attention.*", Style::colwise().with_heads(8))
///     .with_style("blocks.*.attention.output", Style::rowwise().with_heads(8).with_output(Shard(1)))
///     .with_style("blocks.*.mlp.up", Style::colwise())
///     .with_style("blocks.*.mlp.down", Style::rowwise().with_output(Shard(1)))
///     .with_units(["blocks.*"]);
/// ```
///
/// # Patterns
/// A pattern is a path whose components may contain `*`, `?` and `[0-9]`. `**` matches any number
/// of components, and the empty pattern is the model itself. A pattern that matches nothing is an
/// error.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    pub(super) styles: Vec<PatternEntry<Style>>,
    pub(super) modules: Vec<PatternEntry<PrepareModuleInputOutput>>,
    pub(super) units: Vec<String>,
}

/// Style or layout that a plan assigns to a pattern on a mesh dimension.
#[derive(Debug, Clone)]
pub(super) struct PatternEntry<T> {
    /// Name of the mesh dimension; `None` if the mesh has only one.
    pub(super) mesh_dim: Option<String>,
    pub(super) pattern: String,
    pub(super) given: T,
}

impl Plan {
    /// Creates a plan in which every parameter is `Replicate`, in one unit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Assigns a style to the modules and parameters whose path matches a [pattern](Self#patterns).
    ///
    /// A pattern that matches a module applies to all parameters inside it. If several patterns
    /// apply to a parameter, the last one given is used, so add general patterns before specific
    /// ones.
    #[must_use]
    pub fn with_style(mut self, pattern: impl Into<String>, style: impl Into<Style>) -> Self {
        self.styles.push(PatternEntry {
            mesh_dim: None,
            pattern: pattern.into(),
            given: style.into(),
        });
        self
    }

    /// Assigns layouts to the inputs and outputs of the modules whose path matches a
    /// [pattern](Self#patterns). They apply where the forward is called by
    /// [`apply_io_layouts`](crate::nn::apply_io_layouts). If several patterns match a module, the
    /// last one given is used.
    ///
    /// A module finds its layouts through its parameters, so it must have some. Around other
    /// modules, call [`redistribute`](crate::dtensor::DTensor::redistribute).
    #[must_use]
    pub fn with_io(mut self, pattern: impl Into<String>, module: PrepareModuleInputOutput) -> Self {
        self.modules.push(PatternEntry {
            mesh_dim: None,
            pattern: pattern.into(),
            given: module,
        });
        self
    }

    /// Adds the entries of `plan` for the mesh dimension `mesh_dim`. This builds a plan for a mesh
    /// of several dimensions. On a mesh dimension for which no entry matches, parameters are
    /// `Replicate`, and inputs and outputs stay as they are.
    ///
    /// ```
    /// use burn_dtensor::parallel::{Plan, Style};
    ///
    /// // `cp` shards the sequence and `tp` the features, on a mesh such as (cp=2, tp=4).
    /// let tensor = Plan::new().with_style("**.up", Style::colwise()).with_style("**.down", Style::rowwise());
    /// let context = Plan::new().with_style("**", Style::sequence_parallel());
    /// let plan = Plan::new().with_mesh_dim_plan("tp", tensor).with_mesh_dim_plan("cp", context);
    /// ```
    #[must_use]
    pub fn with_mesh_dim_plan(mut self, mesh_dim: impl Into<String>, plan: Self) -> Self {
        fn named<T>(
            entries: Vec<PatternEntry<T>>,
            name: &str,
        ) -> impl Iterator<Item = PatternEntry<T>> {
            entries.into_iter().map(move |entry| PatternEntry {
                mesh_dim: entry.mesh_dim.or_else(|| Some(name.into())),
                ..entry
            })
        }
        let name = mesh_dim.into();
        self.styles.extend(named(plan.styles, &name));
        self.modules.extend(named(plan.modules, &name));
        self.units.extend(plan.units);
        self
    }

    /// Makes a unit of every module whose path matches a [pattern](Self#patterns);
    /// [`unit`](fn@crate::fsdp::unit) marks its forward. Partial gradients are summed once per
    /// unit.
    ///
    /// If [`fully_shard`](crate::fsdp::fully_shard) is called too, it defines its own units.
    #[must_use]
    pub fn with_units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }
}
