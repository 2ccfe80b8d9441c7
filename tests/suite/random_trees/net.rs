//! [`Net`]: the modules of a plan, and their forward.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::fsdp::{checkpoint_activations, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;

use super::activation::{Activation, or_unwind};
use super::node::{Node, Run, Split};
use super::plan::Plan;

/// Neither even nor a multiple of the ranks: parts are uneven.
pub const WIDTH: usize = 5;
const WORDS: usize = 7;
const SEQ: usize = 2;

#[derive(Module, Debug)]
pub struct Net {
    table: Embedding,
    tree: Tree,
}

#[derive(Module, Debug)]
pub struct Tree {
    layer: Linear,
    back: Option<Linear>,
    /// In single precision.
    factor: Option<Param<Tensor<1>>>,
    children: Vec<Tree>,
}

impl Net {
    /// One of the plan's models, in double precision; the values depend on the plan and its number
    /// alone.
    pub fn new(plan: &Plan, model: usize, device: &Device) -> Self {
        let net = Self {
            table: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            tree: Tree::new(&plan.tree, device),
        };
        net.map(&mut Fill {
            device: device.clone(),
            state: plan.seed + ((model as u64) << 32),
            dtype: DType::F64,
        })
    }

    /// Calls `of_net` with the net, and `of_tree` with the tree inside.
    pub fn modules<E>(
        &self,
        of_net: impl FnOnce(&Self) -> Result<(), E>,
        of_tree: impl FnOnce(&Tree) -> Result<(), E>,
    ) -> Result<(), E> {
        of_net(self)?;
        of_tree(&self.tree)
    }

    /// Replaces a child of the tree.
    pub fn map_child<E>(
        mut self,
        child: usize,
        map: impl FnOnce(Tree) -> Result<Tree, E>,
    ) -> Result<Self, E> {
        let old = self.tree.children.remove(child);
        self.tree.children.insert(child, map(old)?);
        Ok(self)
    }

    /// The same with all parameters in this dtype.
    pub fn cast(self, dtype: DType) -> Self {
        self.map(&mut Cast(dtype))
    }

    /// The loss of a data-parallel rank's samples in a micro-batch; `tp`: of ranks that compute it
    /// together.
    pub fn loss(
        &self,
        plan: &Plan,
        run: Run,
        tp: Option<&DeviceMesh>,
        device: &Device,
    ) -> Tensor<1> {
        let batch = plan.batches[run.rank];
        let word = |at: usize| ((at * 5 + run.rank * 3 + run.batch + run.model * 2) % WORDS) as i64;
        let words: Vec<i64> = (0..batch * SEQ).map(word).collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, [batch, SEQ]), device);
        let output = |net: &Self, words: Tensor<2, Int>| {
            let x = net.table.forward(words);
            let x = if plan.given.on(run) { x } else { x.detach() };
            let y = match tp {
                None => net.tree.forward(&plan.tree, x.clone(), &x, run),
                Some(tp) => {
                    let x = or_unwind(DTensor::from_local(x, tp, &[Placement::Replicate]));
                    or_unwind(
                        net.tree
                            .forward(&plan.tree, x.clone(), &x, run)
                            .full_tensor(),
                    )
                }
            };
            if plan.tied {
                y.matmul(net.table.weight.val().transpose().unsqueeze())
            } else {
                y
            }
        };
        let y = if plan.scoped {
            unit(self, Vec::<Tensor<3>>::new(), |net, _| output(net, words))
        } else {
            output(self, words)
        };
        // Of stored parameters: what half precision has made of it goes no further.
        let y = y.cast(self.table.weight.base().dtype());
        let elements = y.shape().num_elements();
        let weights: Vec<f64> = (0..elements)
            .map(|at| 0.5 + (at % 7) as f64 / 7.0)
            .collect();
        let weights = Tensor::from_data(TensorData::new(weights, y.shape()), (device, y.dtype()));
        let scale = Tensor::from_data([plan.scaling.loss], (device, y.dtype()));
        (y.tanh() * weights).mean() * scale
    }
}

impl Tree {
    fn new(node: &Node, device: &Device) -> Self {
        let layer = |from, to, frozen| {
            let layer = LinearConfig::new(from, to).init(device);
            if frozen { layer.no_grad() } else { layer }
        };
        let (features, back) = match node.split {
            Split::Through { features, frozen } => (features, Some(layer(features, WIDTH, frozen))),
            _ => (WIDTH, None),
        };
        let layer = layer(WIDTH, features, node.frozen);
        let factor = node
            .narrow
            .then(|| Param::from_tensor(Tensor::ones([WIDTH], device)));
        let factor = if node.frozen {
            factor.no_grad()
        } else {
            factor
        };
        Self {
            layer,
            back,
            factor,
            children: node
                .children
                .iter()
                .map(|child| Self::new(child, device))
                .collect(),
        }
    }

    /// `captured` is what the whole tree was given.
    fn forward<T: Activation>(&self, node: &Node, x: T, captured: &T, run: Run) -> T {
        if node.left_out.contains(&run.batch) {
            return x;
        }
        let once = |x| match (node.scoped, node.recomputed) {
            (true, true) => {
                let node = node.clone();
                let body =
                    move |tree: &Self, (x, captured): (T, T)| tree.body(&node, x, &captured, run);
                checkpoint_activations(self, (x, captured.clone()), body)
            }
            (true, false) => unit(self, x, |tree, x| tree.body(node, x, captured, run)),
            (false, _) => self.body(node, x, captured, run),
        };
        let x = once(x);
        if node.twice { once(x) } else { x }
    }

    fn body<T: Activation>(&self, node: &Node, mut x: T, captured: &T, run: Run) -> T {
        if node.used.on(run) {
            let compute = if node.local { T::local_layer } else { T::layer };
            x = [&self.layer]
                .into_iter()
                .chain(&self.back)
                .fold(x, |x, layer| compute(x, layer, node.flat));
            x = self.factor.iter().fold(x, T::times);
        }
        x = (0..node.tail).fold(x, |x, _| x.tanh());
        if node.captures {
            x = x.plus(captured.clone());
        }
        let children = || self.children.iter().zip(&node.children);
        if node.chain {
            return children().fold(x, |x, (tree, node)| tree.forward(node, x, captured, run));
        }
        let towers =
            children().map(|(tree, node)| (node, tree.forward(node, x.clone(), captured, run)));
        let heard = towers
            .filter(|(node, _)| !node.unheard)
            .map(|(_, tower)| tower);
        heard.reduce(T::plus).unwrap_or(x)
    }
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| {
            let (is_trained, device) = (base.is_require_grad(), base.device());
            Tensor::from_data(base.into_data(), (&device, self.0)).set_require_grad(is_trained)
        })
    }
}

/// Gives every parameter values of its own.
struct Fill {
    device: Device,
    state: u64,
    dtype: DType,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.dtype = if name == "factor" {
            DType::F32
        } else {
            DType::F64
        };
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| {
            let mut value = |_| {
                self.state = self
                    .state
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(0x1405_7b7e_f767_814f);
                (self.state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
            };
            let values: Vec<f64> = (0..base.shape().num_elements()).map(&mut value).collect();
            let data = TensorData::new(values, base.shape());
            Tensor::from_data(data, (&self.device, self.dtype))
                .set_require_grad(base.is_require_grad())
        })
    }
}
