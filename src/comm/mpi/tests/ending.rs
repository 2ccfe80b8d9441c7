//! How processes end.

use super::*;

/// Process 0 sends process 1 something large, and ends by `end` before its courier's thread, which process 1 has made wait,
/// has seen it; process 1 gets it, and then is told.
fn end_at_once(end: impl FnOnce()) {
    let courier = start(FragmentLimits::default());
    let large = || payload(0, 1, 32 << 20);
    let told = inbox(&courier);
    if courier.process_index() == 0 {
        told.recv().unwrap();
        for _ in 0..3 {
            courier.send(1, parcel("large", [large()]));
        }
        return end();
    }
    courier.send(0, parcel("wait", []));
    let mut arrived = 0;
    loop {
        match told.recv().unwrap() {
            News::Header { .. } => (),
            News::Arrived { payloads, .. } => {
                arrived += 1;
                assert_eq!(payloads, [(*large()).as_ref()]);
            }
            News::Lost { process, problem } => {
                assert_eq!((process, &problem[..]), (Some(0), "process 0 has ended"));
                break;
            }
        }
    }
    println!("{arrived} have arrived");
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_returns() {
    let text = ProcessTest::new(2).run(|| end_at_once(|| ()));
    assert!(text.is_none_or(|text| text.contains("3 have arrived")));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_the_process_exits() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| std::process::exit(7)));
    assert!(text.is_none_or(|text| text.contains("3 have arrived") && text.starts_with("exit status: 7\n")));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_panics() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| panic!("process 0 ends by this")));
    assert!(text.is_none_or(|text| text.contains("3 have arrived") && text.contains("ends by this")));
}

#[test]
fn invariant_4_a_process_that_never_asked_ends_what_is_sent_to_it() {
    ProcessTest::new(3).run(|| {
        let courier = start(FragmentLimits::default());
        others(&courier).for_each(|to| courier.send(to, parcel("unwanted", [payload(0, 0, 32 << 20)])));
    });
}

#[test]
fn invariant_6_a_panic_of_the_addressee_loses_all_and_aborts_the_job() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        if courier.process_index() == 0 {
            have_the_other_panic(&courier, &told);
        }
        assert!(matches!(told.recv().unwrap(), News::Header { .. }));
        match told.recv().unwrap() {
            News::Lost { process: None, problem } => println!("lost: {problem}"),
            news => panic!("{news:?}"),
        }
    });
    let Some(text) = text else { return };
    assert!(text.contains("lost: the courier panicked: as asked"), "{text}");
    // Which Open MPI's launcher says of processes that end without either.
    assert!(!text.contains("is told nothing") && !text.contains("finalize"), "{text}");
}

#[test]
fn a_process_that_ends_on_the_couriers_thread_does_so_at_once() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        others(&courier).for_each(|to| courier.send(to, parcel("exit", [])));
        while told.recv().is_ok() {}
    });
    assert!(text.is_none_or(|text| text.starts_with("exit status: 3\n") && !text.contains("panicked")));
}
