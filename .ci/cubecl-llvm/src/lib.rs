//! What cubecl-cuda 0.11.3 names of cubecl-llvm. Nothing here runs where kernels are compiled with
//! NVRTC.

use cubecl_core::{ir::nvidia::SmArch, prelude::KernelDefinition};
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::BufferIOAttr;

const NO_LLVM: &str = "built without LLVM: turn on cubecl/cuda-cpp, so that NVRTC compiles kernels";

pub mod nvptx {
    pub mod ptx_version {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum PtxVersion {}

        impl PtxVersion {
            /// Leaves the choice to the compiler.
            pub fn for_driver(_: i32) -> Option<Self> {
                None
            }
        }

        impl std::fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {}
            }
        }
    }
}

pub mod shared {
    pub mod lowered_features {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            Nvptx,
        }

        /// # Panics
        /// Always: called where LLVM is the compiler.
        pub fn restrict_features(_: &mut cubecl_core::ir::DeviceProperties, _: GpuTarget) {
            panic!("{}", crate::NO_LLVM);
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    #[default]
    Cpu,
    Nvptx,
}

#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    pub target: LlvmTarget,
}

#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    pub arch: Option<()>,
    pub sm_arch: Option<SmArch>,
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    pub grid_constants: bool,
    pub f16_evaluation: (),
}

#[derive(Clone, Debug)]
pub struct NvptxModule {
    pub ptx: Vec<std::ffi::c_char>,
    pub entrypoint: String,
    pub ir: String,
    pub shared_memory_size: usize,
    pub io: Vec<BufferIOAttr>,
}

/// Never made.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    Jit,
    NvptxCode(NvptxModule),
}

impl std::fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NO_LLVM)
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn buffer_io(_: &Self::Representation) -> Option<Vec<BufferIOAttr>> {
        None
    }

    fn compile(
        &mut self,
        _: KernelDefinition,
        _: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: NO_LLVM.into(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}
