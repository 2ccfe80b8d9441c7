//! [`Net`]: a model with parameters and buffers of any shape and dtype.

use burn::module::{Module, ModuleVisitor, Param, ParamId, RunningState};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, BoolStore, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::dtensor::Kind;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
pub const INTS: [DType; 8] = [
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];

/// Shape and dtype of one tensor, and whether it is trained.
pub type Item = (Vec<usize>, DType, bool);

/// The tensors of a block, each of which may be missing.
#[derive(Debug, Clone, Default)]
pub struct BlockPlan {
    pub vector: Option<Item>,
    pub matrix: Option<Item>,
    pub cube: Option<Item>,
    pub kernel: Option<Item>,
    pub ints: Option<Item>,
    pub mask: Option<Item>,
    pub running: Option<Item>,
}

/// Blocks, and experts, of which some meshes hold each on a part of their ranks.
#[derive(Debug, Clone)]
pub struct NetPlan {
    pub blocks: Vec<BlockPlan>,
    pub experts: Vec<BlockPlan>,
}

#[derive(Module, Debug)]
pub struct Net {
    pub blocks: Vec<Block>,
    pub experts: Vec<Block>,
}

#[derive(Module, Debug)]
pub struct Block {
    vector: Option<Param<Tensor<1>>>,
    matrix: Option<Param<Tensor<2>>>,
    cube: Option<Param<Tensor<3>>>,
    kernel: Option<Param<Tensor<4>>>,
    ints: Option<Param<Tensor<2, Int>>>,
    mask: Option<Param<Tensor<1, Bool>>>,
    running: Option<RunningState<Tensor<1>>>,
}

impl NetPlan {
    pub fn draw(rng: &mut StdRng) -> Self {
        let blocks = (0..rng.random_range(1..=3))
            .map(|_| BlockPlan::draw(rng))
            .collect();
        // What is placed over experts has no buffers.
        let expert = |rng: &mut StdRng| BlockPlan {
            ints: None,
            mask: None,
            running: None,
            ..BlockPlan::draw(rng)
        };
        Self {
            blocks,
            experts: (0..rng.random_range(0..=1)).map(|_| expert(rng)).collect(),
        }
    }

    /// Creates the model. With `bits`, floats have any bits, also those of infinities and NaNs;
    /// otherwise they are finite.
    pub fn build(&self, seed: u64, bits: bool, device: &Device) -> Net {
        let mut fill = Fill {
            rng: StdRng::seed_from_u64(seed),
            bits,
            device: device.clone(),
        };
        let mut blocks = |plans: &[BlockPlan]| plans.iter().map(|plan| fill.block(plan)).collect();
        Net {
            blocks: blocks(&self.blocks),
            experts: blocks(&self.experts),
        }
    }
}

impl BlockPlan {
    fn draw(rng: &mut StdRng) -> Self {
        let item = |rng: &mut StdRng, share: f64, ndim: usize, dtypes: &[DType]| {
            // Uneven over most numbers of ranks, and often fewer than them.
            let most = [40, 11, 6, 4][ndim - 1];
            let shape = (0..ndim).map(|_| rng.random_range(1..=most)).collect();
            let (dtype, is_trained) = (
                dtypes[rng.random_range(0..dtypes.len())],
                rng.random_bool(0.8),
            );
            rng.random_bool(share).then_some((shape, dtype, is_trained))
        };
        let mut plan = Self {
            vector: item(rng, 0.4, 1, &FLOATS),
            matrix: item(rng, 0.8, 2, &FLOATS),
            cube: item(rng, 0.3, 3, &FLOATS),
            kernel: item(rng, 0.2, 4, &FLOATS),
            ints: item(rng, 0.2, 2, &INTS),
            mask: item(rng, 0.2, 1, &[DType::Bool(BoolStore::Native)]),
            running: item(rng, 0.2, 1, &FLOATS[..2]),
        };
        if plan.floats().next().is_none() {
            plan.vector = Some((vec![3], DType::F32, true));
        }
        plan
    }

    fn floats(&self) -> impl Iterator<Item = (&'static str, &Item)> {
        let all = [
            ("vector", &self.vector),
            ("matrix", &self.matrix),
            ("cube", &self.cube),
            ("kernel", &self.kernel),
        ];
        all.into_iter()
            .filter_map(|(name, item)| Some((name, item.as_ref()?)))
    }
}

struct Fill {
    rng: StdRng,
    bits: bool,
    device: Device,
}

impl Fill {
    fn block(&mut self, plan: &BlockPlan) -> Block {
        Block {
            vector: self.float(&plan.vector),
            matrix: self.float(&plan.matrix),
            cube: self.float(&plan.cube),
            kernel: self.float(&plan.kernel),
            ints: self
                .tensor(&plan.ints)
                .map(|tensor| Param::initialized(ParamId::new(), tensor)),
            mask: self
                .tensor(&plan.mask)
                .map(|tensor| Param::initialized(ParamId::new(), tensor)),
            running: self.tensor(&plan.running).map(RunningState::new),
        }
    }

    fn float<const D: usize>(&mut self, item: &Option<Item>) -> Option<Param<Tensor<D>>> {
        let param = Param::from_tensor(self.tensor(item)?);
        Some(
            if item.as_ref().is_some_and(|(_, _, is_trained)| *is_trained) {
                param
            } else {
                param.no_grad()
            },
        )
    }

    fn tensor<const D: usize, K: Kind>(&mut self, item: &Option<Item>) -> Option<Tensor<D, K>> {
        let (shape, dtype, _) = item.as_ref()?;
        Some(Tensor::from_data(
            data(&mut self.rng, shape, *dtype, self.bits),
            (&self.device, *dtype),
        ))
    }
}

/// Random elements: any bits, or finite floats. Booleans are 0 or 1.
pub fn data(rng: &mut StdRng, shape: &[usize], dtype: DType, bits: bool) -> TensorData {
    let elements = shape.iter().product::<usize>();
    if dtype.is_float() && !bits {
        let values: Vec<f32> = (0..elements).map(|_| rng.random_range(-1.0..1.0)).collect();
        return TensorData::new(values, shape.to_vec()).convert_dtype(dtype);
    }
    let mut bytes = vec![0; elements * dtype.size()];
    rng.fill_bytes(&mut bytes);
    if dtype.is_bool() {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    TensorData::from_bytes_vec(bytes, shape.to_vec(), dtype)
}

/// Returns gradients for most trained parameters, each a function of the parameter's elements: so
/// they are shards of one gradient, however the model is distributed.
pub fn grads<M: Module>(model: &M, step: u64) -> GradientsParams {
    struct Grads {
        seen: u64,
        step: u64,
        grads: GradientsParams,
    }
    impl ModuleVisitor for Grads {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.seen += 1;
            if param.is_require_grad() && !(self.seen + self.step).is_multiple_of(4) {
                let grad = param.base().inner() * 0.5 + (self.step as f64 + 1.0) * 0.25;
                self.grads.register(param.id, grad);
            }
        }
    }
    let mut grads = Grads {
        seen: 0,
        step,
        grads: GradientsParams::new(),
    };
    model.visit(&mut grads);
    grads.grads
}
