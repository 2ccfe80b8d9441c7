//! What `sharded` does not compile with, and what the compiler says to that.

use crate::compiler::Compiler;

/// A program that has `optimizer` in it.
fn program(optimizer: &str) -> String {
    format!(
        "use burn::optim::*;
         use burn_dtensor::optim::{{ShardedOptimizer, sharded}};
         pub fn make() -> ShardedOptimizer {{ sharded({optimizer}) }}"
    )
}

#[test]
fn optimizers_that_look_at_more_than_an_element_do_not_compile_and_the_message_says_what_to_use() {
    let compiler = Compiler::new("optimizers");
    compiler
        .check(&program("AdamWConfig::new()"))
        .expect("what is exact compiles");
    for optimizer in [
        "LBFGSConfig::new()",
        "LambConfig::new()",
        "AdafactorConfig::new()",
        "MuonConfig::new()",
        "MuonConfig::new().build()",
    ] {
        let text = compiler
            .check(&program(optimizer))
            .expect_err("it looks at more than an element");
        let name = if optimizer.ends_with("build()") {
            "Muon"
        } else {
            optimizer.trim_end_matches("::new()")
        };
        let said = [
            "error[E0277]: `".into(),
            format!("{name}` is not known to step a shard as it would step the full parameter"),
            "sharded(AdamWConfig::new()).with_muon(matrices, MuonConfig::new())".into(),
            "`clip_grad_norm`".into(),
            "implement `ExactOnShards`".into(),
        ];
        for said in said {
            assert!(text.contains(&said), "of {optimizer}, `{said}` in:\n{text}");
        }
    }
    compiler.finish();
}
