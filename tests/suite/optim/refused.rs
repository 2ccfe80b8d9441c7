//! What `sharded` does not compile with, and what the compiler says to that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use std::{env, fs};

/// The libraries of this name beside this test, the newest first.
fn built(name: &str) -> Vec<PathBuf> {
    let test = env::current_exe().expect("it runs");
    let other = fs::read_dir(test.parent().expect("a folder")).expect("it is read").flatten().map(|entry| entry.path());
    let is = |path: &PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib")
    };
    let mut found: Vec<_> = other.filter(is).collect();
    let age = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    found.sort_by_key(|path| std::cmp::Reverse(age(path)));
    found
}

/// Checks a program that has `optimizer` in it; what the compiler says if it is wrong.
fn check(optimizer: &str, [ours, burn]: [&Path; 2], scratch: &Path) -> Result<(), String> {
    let program = format!(
        "use burn::optim::*;
         use burn_dtensor::optim::{{ShardedOptimizer, sharded}};
         pub fn make() -> ShardedOptimizer {{ sharded({optimizer}) }}"
    );
    let source = scratch.join("program.rs");
    fs::write(&source, program).expect("it is written");
    let library = |name: &str, path: &Path| format!("{name}={}", path.display());
    let deps = format!("dependency={}", ours.parent().expect("a folder").display());
    let output = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "-L", &deps])
        .args(["--extern", &library("burn_dtensor", ours), "--extern", &library("burn", burn), "-o"])
        .args([scratch.join("program.rmeta"), source])
        .output()
        .expect("tests are built by a compiler");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn optimizers_that_look_at_more_than_an_element_do_not_compile_and_the_message_says_what_to_use() {
    let scratch = env::temp_dir().join(format!("burn-dtensor-refused-{}", std::process::id()));
    fs::create_dir_all(&scratch).expect("a folder");
    // Of several builds the one that fits together.
    let (all_ours, all_burns) = (built("burn_dtensor"), built("burn"));
    let pairs = all_ours.iter().flat_map(|ours| all_burns.iter().map(move |burn| [ours.as_path(), burn.as_path()]));
    let mut said = String::from("nothing is built");
    let fits = |pair: &[&Path; 2]| check("AdamWConfig::new()", *pair, &scratch).map_err(|text| said = text).is_ok();
    let pair = pairs.into_iter().find(fits);
    let pair = pair.unwrap_or_else(|| panic!("what is exact compiles: {said}"));

    for optimizer in [
        "LBFGSConfig::new()",
        "LambConfig::new()",
        "AdafactorConfig::new()",
        "MuonConfig::new()",
        "MuonConfig::new().build()",
    ] {
        let text = check(optimizer, pair, &scratch).expect_err("it looks at more than an element");
        let name = if optimizer.ends_with("build()") { "Muon" } else { optimizer.trim_end_matches("::new()") };
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
    fs::remove_dir_all(scratch).expect("it is removed");
}
