//! End of processes.

use super::*;

/// Process 0 sends large messages to process 1, and ends by calling `end` before its progress
/// thread has sent them, because a message of process 1 has made that thread wait. Process 1 must
/// receive the messages, and then the notification that process 0 has ended.
fn end_at_once(end: impl FnOnce()) {
    let courier = start(FragmentLimits::default());
    let large = || payload(0, 1, 32 << 20);
    let told = inbox(&courier);
    if courier.process_index() == 0 {
        told.recv().unwrap();
        for _ in 0..3 {
            courier.send(1, message("large", [large()]));
        }
        return end();
    }
    courier.send(0, message("wait", []));
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
    println!("{arrived} messages have arrived");
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_returns() {
    let text = ProcessTest::new(2).run(|| end_at_once(|| ()));
    assert!(text.is_none_or(|text| text.contains("3 messages have arrived")));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_the_process_exits() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| std::process::exit(7)));
    assert!(text.is_none_or(
        |text| text.contains("3 messages have arrived") && text.starts_with("exit status: 7\n")
    ));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_panics() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| panic!("process 0 ends by this")));
    assert!(text.is_none_or(
        |text| text.contains("3 messages have arrived") && text.contains("ends by this")
    ));
}

#[test]
fn invariant_4_a_process_that_never_asked_ends_what_is_sent_to_it() {
    ProcessTest::new(3).run(|| {
        let courier = start(FragmentLimits::default());
        others(&courier)
            .for_each(|to| courier.send(to, message("without handler", [payload(0, 0, 32 << 20)])));
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
            News::Lost {
                process: None,
                problem,
            } => println!("lost: {problem}"),
            news => panic!("{news:?}"),
        }
    });
    let Some(text) = text else { return };
    assert!(
        text.contains("lost: the MPI transport panicked: as requested"),
        "{text}"
    );
    // The launcher of Open MPI prints the second text for processes that end without `MPI_Abort`
    // and `MPI_Finalize`.
    assert!(
        !text.contains("receives no notification") && !text.contains("finalize"),
        "{text}"
    );
}

#[test]
fn a_process_that_ends_on_the_couriers_thread_does_so_at_once() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        others(&courier).for_each(|to| courier.send(to, message("exit", [])));
        while told.recv().is_ok() {}
    });
    assert!(
        text.is_none_or(|text| text.starts_with("exit status: 3\n") && !text.contains("panicked"))
    );
}
