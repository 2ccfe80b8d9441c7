//! Ranks in several processes, connected by MPI.

use std::path::PathBuf;
use std::process::{Command, abort, id};
use std::time::Duration;
use std::{env, fs, thread};

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Distribution, Tensor};
use burn_dtensor::fsdp::full_model;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{Conformance, MeshTest, ProcessTest};
use burn_dtensor_flight::{FaultKind, LaunchTrace};

/// Every case on two processes of a rank each; on others some, where there is no time for all.
fn conforms(processes: usize, ranks: usize) {
    let is_brief = ranks > 2 && !crate::effort::is_long();
    let text = ProcessTest::new(processes)
        .with_deadline(Duration::from_secs(1200))
        .run(|| {
            let conformance =
                Conformance::of(|ranks| Launch::from_env(ranks).unwrap()).with_ranks([ranks]);
            let report = if is_brief {
                conformance.with_few_cases()
            } else {
                conformance
            }
            .run();
            println!("cases {}", report.total());
        });
    let Some(text) = text else { return };
    // The line may begin with the name of the test.
    let count = |line: &str| line.split_once("cases ")?.1.parse().ok();
    let counts: Vec<usize> = text.lines().filter_map(count).collect();
    let least = if is_brief { 1000 } else { 10_000 };
    assert_eq!(
        counts.len(),
        processes,
        "each process says how many cases it tried: {text}"
    );
    assert!(counts.iter().all(|cases| *cases > least), "{counts:?}");
}

#[test]
fn two_processes_conform() {
    conforms(2, 2);
}

#[test]
fn three_processes_conform() {
    conforms(3, 3);
}

#[test]
fn four_processes_conform() {
    conforms(4, 4);
}

#[test]
fn two_processes_of_two_ranks_conform() {
    conforms(2, 4);
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |net, mut x| {
            for block in &net.blocks {
                x = unit(block, x, |block, x| block.forward(x).tanh());
            }
            net.head.forward(x)
        })
    }
}

/// Five steps on a mesh of replicas and shards; the bits of every loss and of the weights at the
/// end, in one line.
fn bits(world: &World) -> Result<String> {
    let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
    let device = world.device().clone().autodiff();
    let net = world.run_seeded(5, || Net {
        blocks: (0..2)
            .map(|_| LinearConfig::new(16, 16).init(&device))
            .collect(),
        head: LinearConfig::new(16, 3).init(&device),
    })?;
    let mut net = fully_shard(net, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
    let mut optim = AdamWConfig::new().init();
    let mut line = String::from("bits");
    for step in 0..5 {
        let own = 10 * step + world.rank() as u64;
        let x = mesh.world().run_seeded(own, || {
            Tensor::<2>::random([8, 16], Distribution::Default, &device)
        })?;
        let loss = (net.forward(x) - 1.0).square().mean();
        line += &format!(
            " {:08x}",
            mesh.all_reduce(loss.clone().into_scalar::<f32>(), ReduceOp::Avg)?
                .to_bits()
        );
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(1e-2, net, grads);
    }
    let mut weights = |weight: &Param<Tensor<2>>| {
        let values: Vec<f32> = weight
            .val()
            .into_data()
            .try_to_vec()
            .expect("weights are f32");
        let fold =
            |hash: u64, value: f32| hash.wrapping_mul(0x100_0000_01b3) ^ u64::from(value.to_bits());
        line += &format!(" {:016x}", values.into_iter().fold(0, fold));
    };
    let full = full_model(&net)?;
    full.blocks
        .iter()
        .chain([&full.head])
        .for_each(|linear| weights(&linear.weight));
    Ok(line)
}

#[test]
fn a_model_trains_to_the_bits_of_threads() {
    for processes in [4, 2] {
        let text = ProcessTest::new(processes).run(|| {
            let lines = launch(Launch::from_env(4).unwrap(), bits).unwrap();
            // Lines of several processes may come at once, but each as a whole.
            lines.into_iter().for_each(|(_, line)| println!("{line}"));
        });
        let Some(text) = text else { return };
        let expected = launch(Launch::threads(4), bits).unwrap();
        for (rank, line) in expected {
            assert!(
                text.contains(&line),
                "{processes} processes, rank {rank}: {line}\n{text}"
            );
        }
    }
}

#[test]
fn a_mesh_is_one_of_the_ranks_of_all_processes() {
    let text = MeshTest::new([2, 2], ["dp", "tp"])
        .with_processes(2)
        .run(|mesh| {
            println!("rank {} at {:?}", mesh.rank(), mesh.coordinate().unwrap());
            mesh.world().barrier("all have a place")
        });
    let Some(text) = text else { return };
    for (rank, place) in [[0, 0], [0, 1], [1, 0], [1, 1]].iter().enumerate() {
        assert_eq!(
            text.matches(&format!("rank {rank} at {place:?}\n")).count(),
            1,
            "{text}"
        );
    }
}

#[test]
fn a_failing_rank_fails_the_test_with_the_report_of_its_launch() {
    let text = MeshTest::new([2], ["dp"])
        .with_processes(2)
        .run_failing(|mesh| match mesh.rank() {
            1 => Err(Error::other("no batch left")),
            _ => mesh.world().barrier("the next batch"),
        });
    assert!(
        text.is_none_or(
            |text| text.contains("on mesh dp=2: launch failed at rank 1: no batch left")
        )
    );
}

#[test]
#[should_panic(expected = "rank 1 is lost")]
fn a_lost_rank_fails_the_test_with_what_it_wrote() {
    MeshTest::new([2], ["dp"]).with_processes(2).run(|mesh| {
        mesh.world().barrier("all are there")?;
        if mesh.rank() == 1 {
            eprintln!("rank 1 is lost");
            std::process::abort();
        }
        mesh.world().barrier("one is lost")
    });
}

#[derive(Module, Debug)]
struct Dropping {
    up: Linear,
    dropout: Dropout,
    down: Linear,
}

/// Three steps with burn's own `Dropout`; the bits of this rank's losses, in one line.
fn dropping(mesh: &DeviceMesh) -> Result<String> {
    let device = mesh.device().clone().autodiff();
    let net = mesh.world().run_seeded(5, || Dropping {
        up: LinearConfig::new(8, 32).init(&device),
        dropout: DropoutConfig::new(0.5).init(),
        down: LinearConfig::new(32, 1).init(&device),
    })?;
    let mut net = fully_shard(net, mesh, FullyShard::new())?;
    let mut optim = AdamWConfig::new().init();
    // From here on the rank draws alone from the random state of its process, whatever that has
    // drawn before.
    Tensor::<1>::random(
        [1 + std::process::id() as usize % 1000],
        Distribution::Default,
        &device,
    );
    device.seed(100 + mesh.rank() as u64);
    let mut line = format!("bits of rank {}:", mesh.rank());
    for _ in 0..3 {
        let x = Tensor::<2>::ones([16, 8], &device);
        let y = unit(&net, x, |net, x| {
            net.down.forward(net.dropout.forward(net.up.forward(x)))
        });
        let loss = y.square().mean();
        line += &format!(" {:08x}", loss.clone().into_scalar::<f32>().to_bits());
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(1e-2, net, grads);
    }
    Ok(line)
}

#[test]
fn burns_own_dropout_repeats_where_a_rank_has_its_process_to_itself() {
    let run = || {
        let text = MeshTest::new([2], ["dp"]).with_processes(2).run(|mesh| {
            println!("{}", dropping(mesh)?);
            Ok(())
        })?;
        let mut ranks: Vec<_> = text
            .lines()
            .filter_map(|line| Some(line.split_once("bits of ")?.1.to_string()))
            .collect();
        ranks.sort();
        Some(ranks)
    };
    let Some(first) = run() else { return };
    assert_eq!(run(), Some(first.clone()));
    // Ranks on equal data drop other elements.
    let [(rank_0, first), (rank_1, second)] =
        [0, 1].map(|rank| first[rank].split_once(": ").expect("its losses"));
    assert_eq!([rank_0, rank_1], ["rank 0", "rank 1"]);
    assert_ne!(first, second);
}

#[test]
fn ranks_that_do_not_divide_evenly_over_processes_are_an_error_that_one_prints() {
    let text = ProcessTest::new(3).run_failing(|| {
        let error = Error::from(Launch::from_env(4).unwrap_err());
        if !error.is_reported_by_other_process() {
            println!("{error}");
        }
        std::process::exit(1);
    });
    let told = "cannot distribute 4 ranks evenly over 3 processes";
    assert!(text.is_none_or(|text| text.matches(told).count() == 1));
}

#[test]
fn a_launch_that_fails_in_several_processes_is_reported_once_with_the_ranks_of_all() {
    let text = ProcessTest::new(3).run_failing(|| {
        let failed = launch(Launch::from_env(6).unwrap(), |world| match world.rank() {
            4 => Err(Error::other("no batch left")),
            _ => world.barrier("the next batch"),
        });
        let error = Error::from(failed.unwrap_err());
        if !error.is_reported_by_other_process() {
            println!("{error}");
        }
        std::process::exit(1);
    });
    let Some(text) = text else { return };
    assert_eq!(text.matches("launch failed").count(), 1, "{text}");
    assert!(
        text.contains("launch failed at rank 4: no batch left\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  each of ranks [0, 1, 2, 3, 5] ended with it\n"),
        "{text}"
    );
}

/// Process 0 ends with the report, though rank 1 never ends: neither the end of the launch nor that
/// of the process waits for it. The launcher then ends process 1.
#[test]
fn a_rank_that_is_stuck_in_its_own_code_keeps_no_other_process_from_ending() {
    let text = ProcessTest::new(2).run_failing(|| {
        let config = Launch::from_env(2)
            .unwrap()
            .with_deadline(Duration::from_millis(200));
        let failed = launch(config, |world| -> Result<()> {
            world.barrier("both have started")?;
            if world.rank() == 0 {
                return Err(Error::other("no batch left"));
            }
            loop {
                thread::park();
            }
        });
        println!("{}", failed.unwrap_err());
        std::process::exit(1);
    });
    let Some(text) = text else { return };
    assert!(
        text.contains("launch failed at rank 0: no batch left\n"),
        "{text}"
    );
    assert!(
        text.contains("rank 1 ended with: rank 1 was still running 200ms after the failure"),
        "{text}"
    );
}

/// The environment variable that has every rank keep its last operations in a file.
const FLIGHT: &str = "BURN_DTENSOR_FLIGHT";

/// Runs three processes of one rank; once ranks 0 and 2 wait for rank 1 in "step", that one sends
/// itself `signal`, and the others go on with `then`. Returns what they wrote, and what their files
/// say.
fn signalled(
    name: &str,
    signal: &str,
    then: impl Fn(&World) -> Result<()> + Sync,
) -> Option<(String, LaunchTrace)> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("flight-{name}-{}", id()));
    let test = ProcessTest::new(3).with_env(FLIGHT, &folder);
    let text = test.run_failing(|| {
        let failed = launch(Launch::from_env(3).unwrap(), |world| {
            world.barrier("start")?;
            if world.rank() == 1 {
                while waiting_for(1) < 2 {
                    thread::yield_now();
                }
                Command::new("kill")
                    .args([signal, &id().to_string()])
                    .status()?;
                // A signal may take effect some time after it was sent: until then this rank must
                // not join the others.
                loop {
                    thread::park();
                }
            }
            then(world)
        });
        panic!("{}", failed.unwrap_err());
    })?;
    let mut launches = LaunchTrace::read(&folder).unwrap_or_else(|error| panic!("{error}\n{text}"));
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(launches.len(), 1, "{text}");
    Some((text, launches.remove(0)))
}

/// What the files say now.
fn flights() -> Option<LaunchTrace> {
    LaunchTrace::read(env::var_os(FLIGHT).unwrap()).ok()?.pop()
}

/// How many ranks wait for `rank` alone, by the files.
fn waiting_for(rank: usize) -> usize {
    flights().map_or(0, |flights| {
        flights
            .waits()
            .iter()
            .filter(|waiting| waiting.missing == [rank])
            .count()
    })
}

/// The launcher ends the job, and no process of it says anything: the files do.
#[test]
fn a_killed_process_is_named_by_the_files() {
    let Some((text, flights)) = signalled("killed", "-KILL", |world| world.barrier("step")) else {
        return;
    };
    let fault = flights
        .fault()
        .unwrap_or_else(|| panic!("{flights}\n{text}"));
    assert_eq!(
        (fault.rank, fault.why),
        (1, FaultKind::Gone),
        "{flights}\n{text}"
    );
    assert!(
        fault.text.contains(
            "last operation: barrier #0 `start` on ranks [0, 1, 2]; ranks [0, 2] wait for it"
        ),
        "{fault}"
    );
    let ended: Vec<_> = flights
        .ranks
        .iter()
        .map(|flight| flight.ending.is_some())
        .collect();
    assert_eq!(
        ended, [false; 3],
        "the launcher has ended the others, too: {flights}\n{text}"
    );
}

#[test]
fn a_stopped_process_is_named_while_it_is_stopped() {
    let ended = signalled("stopped", "-STOP", |world| {
        let step = world.all().barrier("step".into());
        if world.rank() != 0 {
            return Ok(step.wait()?);
        }
        // It ends by its deadline, whenever the other is stopped.
        let error = step.wait_timeout(Duration::from_secs(1)).unwrap_err();
        let fault = loop {
            match flights().and_then(|flights| flights.fault()) {
                Some(fault) if fault.why == FaultKind::Stopped => break fault,
                _ => thread::yield_now(),
            }
        };
        println!("{error}\nnamed: {fault}");
        // Rank 1 will never say how it has ended.
        abort();
    });
    // The launcher lets the other go on, to end it: what comes of that is no matter of the files'.
    let Some((text, _)) = ended else { return };
    assert!(
        text.contains("ranks [1] did not join within 1s of rank 0's wait"),
        "{text}"
    );
    assert!(
        text.contains("named: rank 1 is stopped: process "),
        "{text}"
    );
}
