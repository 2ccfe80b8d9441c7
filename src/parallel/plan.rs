//! [`Plan`]: which layers are split how.

use super::{PrepareModuleInputOutput, Style};

/// Path patterns and the [`Style`]s of what they match; see [`parallelize`](super::parallelize).
///
/// ```
/// use burn_dtensor::parallel::{Plan, Style};
/// use burn_dtensor::placement::Placement::Shard;
///
/// // A transformer, sequence parallel between its blocks' layers.
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
/// A pattern is a path whose parts may hold `*`, `?` and `[0-9]`; `**` spans parts, and the
/// empty pattern is the model itself. One that matches nothing is an error.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    pub(super) styles: Vec<PatternEntry<Style>>,
    pub(super) modules: Vec<PatternEntry<PrepareModuleInputOutput>>,
    pub(super) units: Vec<String>,
}

/// What a pattern is given on a mesh dimension.
#[derive(Debug, Clone)]
pub(super) struct PatternEntry<T> {
    /// `None` for the only one.
    pub(super) mesh_dim: Option<String>,
    pub(super) pattern: String,
    pub(super) given: T,
}

impl Plan {
    /// Every parameter `Replicate`, in one unit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a style to the modules and parameters whose path matches a [pattern](Self#patterns).
    ///
    /// One that names a module takes all parameters inside. Where several take one parameter, the last given
    /// counts: write the general before the particular.
    #[must_use]
    pub fn with_style(mut self, pattern: impl Into<String>, style: impl Into<Style>) -> Self {
        self.styles.push(PatternEntry { mesh_dim: None, pattern: pattern.into(), given: style.into() });
        self
    }

    /// Says where inputs and outputs of the modules whose path matches a [pattern](Self#patterns) go, which their
    /// forward is called with by [`prepared`](crate::nn::apply_io_layouts). Of several for one module, the last given
    /// counts.
    ///
    /// The modules are those that hold parameters: these know of it. Around others write
    /// [`redistribute`](crate::dtensor::DTensor::redistribute).
    #[must_use]
    pub fn with_io(mut self, pattern: impl Into<String>, module: PrepareModuleInputOutput) -> Self {
        self.modules.push(PatternEntry { mesh_dim: None, pattern: pattern.into(), given: module });
        self
    }

    /// Takes what `plan` says for the mesh dimension of that name: how a plan is written for a mesh of several.
    /// A parameter, input or output of which it says nothing there is `Replicate`, or stays as it is.
    ///
    /// ```
    /// use burn_dtensor::parallel::{Plan, Style};
    ///
    /// // The sequence is cut over `cp`, features over `tp`: for a mesh such as (cp=2, tp=4).
    /// let tensor = Plan::new().with_style("**.up", Style::colwise()).with_style("**.down", Style::rowwise());
    /// let context = Plan::new().with_style("**", Style::sequence_parallel());
    /// let plan = Plan::new().with_mesh_dim_plan("tp", tensor).with_mesh_dim_plan("cp", context);
    /// ```
    #[must_use]
    pub fn with_mesh_dim_plan(mut self, mesh_dim: impl Into<String>, plan: Self) -> Self {
        fn named<T>(entries: Vec<PatternEntry<T>>, name: &str) -> impl Iterator<Item = PatternEntry<T>> {
            entries
                .into_iter()
                .map(move |entry| PatternEntry { mesh_dim: entry.mesh_dim.or_else(|| Some(name.into())), ..entry })
        }
        let name = mesh_dim.into();
        self.styles.extend(named(plan.styles, &name));
        self.modules.extend(named(plan.modules, &name));
        self.units.extend(plan.units);
        self
    }

    /// Makes a unit of every module whose path matches a [pattern](Self#patterns), for
    /// [`unit`](fn@crate::fsdp::unit) to mark: gradients that ranks have terms of are added up a unit at a time.
    ///
    /// [`fully_shard`](crate::fsdp::fully_shard) makes units of its own.
    #[must_use]
    pub fn with_units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }
}
