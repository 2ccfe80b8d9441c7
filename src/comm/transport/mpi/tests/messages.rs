//! Messages of all sizes arrive completely and in order.

use super::*;
use crate::comm::{Launch, ProcessJob};
use crate::testing::Conformance;

/// Every process sends every other process each of `lengths` as a separate message, then all in one
/// message, and checks the messages that it receives.
fn all_pairs(limits: FragmentLimits, header: usize, lengths: &[usize]) {
    let courier = start(limits);
    let told = inbox(&courier);
    let here = courier.process_index();
    let header = "h".repeat(header);
    let messages: Vec<_> = lengths
        .iter()
        .map(std::slice::from_ref)
        .chain([lengths, &[]])
        .collect();
    for lengths in &messages {
        for to in others(&courier) {
            courier.send(
                to,
                message(
                    &header,
                    lengths.iter().map(|length| payload(here, to, *length)),
                ),
            );
        }
    }
    let mut headers = vec![0; courier.processes()];
    let mut arrived = headers.clone();
    let mut told_done = false;
    // Each process sends `done` when it has received all messages of the others. When all `done`
    // have arrived, everything has been sent.
    while others(&courier).any(|from| arrived[from] <= messages.len()) {
        match told.recv().unwrap() {
            News::Header {
                from,
                header: bytes,
                lengths,
            } => {
                let expected = messages
                    .get(headers[from])
                    .map_or((b"done".to_vec(), &[][..]), |of| {
                        (header.clone().into(), of)
                    });
                assert_eq!((bytes, &lengths[..]), expected);
                headers[from] += 1;
            }
            News::Arrived {
                from,
                number,
                payloads,
            } => {
                arrived[from] += 1;
                assert!(
                    headers[from] > number as usize,
                    "the header arrives before its payloads"
                );
                let lengths = messages.get(number as usize).copied().unwrap_or_default();
                let expected: Vec<_> = lengths
                    .iter()
                    .map(|length| payload(from, here, *length))
                    .collect();
                assert!(
                    payloads
                        .iter()
                        .map(Vec::as_slice)
                        .eq(expected.iter().map(|payload| (**payload).as_ref()))
                );
            }
            News::Lost { process, .. } => assert_eq!(arrived[process.unwrap()], messages.len() + 1),
        }
        if !told_done && others(&courier).all(|from| arrived[from] >= messages.len()) {
            told_done = true;
            others(&courier).for_each(|to| courier.send(to, message("done", [])));
        }
    }
    let bytes = messages.len() * header.len() + 2 * lengths.iter().sum::<usize>();
    for to in others(&courier) {
        assert!(
            [bytes, bytes + 4].contains(&(courier.sent()[to] as usize)),
            "{:?} of {bytes}",
            courier.sent()
        );
    }
    assert_eq!(courier.sent()[here], 0);
}

#[test]
fn two_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(2).run(|| {
        all_pairs(
            FragmentLimits::default(),
            100,
            &[0, 8, 100 << 10, (64 << 20) + 1],
        )
    });
}

#[test]
fn three_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(3).run(|| {
        all_pairs(
            FragmentLimits::default(),
            0,
            &[0, 8, 100 << 10, (64 << 20) + 1],
        )
    });
}

#[test]
fn four_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(4).run(|| {
        all_pairs(
            FragmentLimits::default(),
            10_000,
            &[0, 8, 100 << 10, (64 << 20) + 1],
        )
    });
}

#[test]
fn invariant_3_long_payloads_go_in_fragments() {
    let limits = FragmentLimits {
        message: 1000,
        inline_limit: 1500,
    };
    ProcessTest::new(3).run(|| {
        all_pairs(
            limits,
            2500,
            &[
                0,
                1,
                999,
                1000,
                1001,
                1500,
                1501,
                2000,
                100 << 10,
                1_000_000,
            ],
        )
    });
}

/// Returns a function that makes launches whose MPI messages have these limits.
fn launches(limits: FragmentLimits) -> impl Fn(usize) -> Launch {
    let processes = ProcessJob::new(Arc::new(start(limits)));
    move |ranks| Launch::on_backend(processes.backend(ranks / processes.count()))
}

#[test]
fn invariant_3_every_collective_of_tensors_longer_than_a_message() {
    ProcessTest::new(2)
        .with_deadline(Duration::from_secs(600))
        .run(|| {
            let conformance = Conformance::of(launches(FragmentLimits {
                message: 1000,
                inline_limit: 500,
            }))
            .with_ranks([2])
            .with_large_tensors();
            for check in Conformance::names() {
                assert!(conformance.check(check) > 0, "{check}");
            }
        });
}

/// With these limits, headers are split into fragments as well.
#[test]
fn invariant_3_the_conformance_suite_in_messages_of_64_bytes() {
    ProcessTest::new(2)
        .with_deadline(Duration::from_secs(600))
        .run(|| {
            let report = Conformance::of(launches(FragmentLimits {
                message: 64,
                inline_limit: 0,
            }))
            .with_ranks([2])
            .run();
            assert!(report.total() > 10_000, "{report}");
        });
}

#[test]
fn headers_come_in_order_and_payloads_as_they_can() {
    ProcessTest::new(3).run(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        let here = courier.process_index();
        // Some are so large that MPI completes later ones first.
        let header = |number: u64| {
            number.to_string() + &"-".repeat(if number % 100 == 50 { 1 << 20 } else { 0 })
        };
        let length = |number: u64| {
            if number.is_multiple_of(100) {
                4 << 20
            } else {
                number as usize % 2 * 10
            }
        };
        for number in 0..1000 {
            for to in others(&courier) {
                courier.send(
                    to,
                    message(&header(number), [payload(here, to, length(number))]),
                );
            }
        }
        let mut headers = vec![0; courier.processes()];
        let mut arrived = headers.clone();
        while others(&courier).any(|from| arrived[from] < 1000) {
            match told.recv().unwrap() {
                News::Header {
                    from,
                    header: bytes,
                    lengths,
                } => {
                    assert!(
                        bytes == header(headers[from]).into_bytes(),
                        "expected header {} of {from}",
                        headers[from]
                    );
                    assert_eq!(lengths, [length(headers[from])]);
                    headers[from] += 1;
                }
                News::Arrived {
                    from,
                    number,
                    payloads,
                } => {
                    assert_eq!(payloads, [(*payload(from, here, length(number))).as_ref()]);
                    arrived[from] += 1;
                }
                News::Lost { process, .. } => assert_eq!(arrived[process.unwrap()], 1000),
            }
        }
    });
}

#[test]
fn what_has_come_before_it_is_asked_for_is_kept() {
    ProcessTest::new(2).run(|| {
        let courier = start(FragmentLimits::default());
        for to in others(&courier) {
            courier.send(to, message("small", [payload(0, 0, 8)]));
            courier.send(to, message("large", [payload(0, 0, 1 << 20)]));
        }
        thread::sleep(Duration::from_millis(100 * courier.process_index() as u64));
        let told = inbox(&courier);
        let headers = told
            .iter()
            .filter(|news| matches!(news, News::Header { .. }))
            .take(2);
        let headers = headers.map(|news| {
            if let News::Header { header, .. } = news {
                header
            } else {
                Vec::new()
            }
        });
        assert_eq!(headers.collect::<Vec<_>>(), [b"small", b"large"]);
    });
}
