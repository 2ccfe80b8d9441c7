// Written by `cargo run -p tree -- book > src/book.rs`, from `docs/SUMMARY.md`.

//! The book: how to train, parallelize, save, run and debug a model. Its pages are in reading order.
//!
//! # Start
//!
//! - [Introduction](introduction)
//! - [Quick start](quick_start)
//! - [Concepts](concepts)
//! - [Coming from PyTorch](from_pytorch)
//!
//! # Train
//!
//! - [Data parallel](data_parallel)
//! - [FSDP and HSDP](fsdp)
//! - [Optimizers](optimizers)
//! - [Data](data)
//! - [burn's Learner](burn_train)
//! - [Mixed precision](mixed_precision)
//! - [Gradient accumulation](gradient_accumulation)
//! - [Activation checkpointing](activation_checkpointing)
//! - [Offload to host memory](offload)
//! - [Evaluation and generation](evaluation)
//!
//! # Parallelize
//!
//! - [Tensor and sequence parallelism](tensor_parallelism)
//! - [Experts](experts)
//!
//! # Weights
//!
//! - [Checkpoints](checkpoints)
//! - [Saving the full model](saving)
//! - [Pretrained weights](pretrained)
//! - [LoRA](lora)
//!
//! # Run
//!
//! - [Processes and clusters](clusters)
//! - [GPUs](gpus)
//! - [Continuing after a failure](failures)
//!
//! # Debug
//!
//! - [My loss differs](wrong_loss)
//! - [Troubleshooting](troubleshooting)
//!
//! # Extend
//!
//! - [Writing an operator](operators)
//! - [Writing a backend](backend)
//! - [Writing tests on a mesh](testing)
//!
//! # Reference
//!
//! - [Performance](performance)
//! - [Guarantees](guarantees)
//! - [Limits](limits)
//! - [Architecture](architecture)
//! - [Tests of PyTorch and their counterparts](parity)

#[doc = "[concepts.md]: crate::book::concepts"]
#[doc = "[from-pytorch.md]: crate::book::from_pytorch"]
#[doc = "[guides/burn-train.md]: crate::book::burn_train"]
#[doc = "[guides/data.md]: crate::book::data"]
#[doc = "[guides/evaluation.md]: crate::book::evaluation"]
#[doc = "[guides/gpus.md]: crate::book::gpus"]
#[doc = "[guides/pretrained.md]: crate::book::pretrained"]
#[doc = "[guides/tensor-parallelism.md#on-one-device]: crate::book::tensor_parallelism#on-one-device"]
#[doc = "[guides/wrong-loss.md]: crate::book::wrong_loss"]
#[doc = "[memory.svg]: data:image/svg+xml;base64,PHN2ZyB4bWxucz0iaHR0cDovL3d3dy53My5vcmcvMjAwMC9zdmciIHZpZXdCb3g9IjAgMCA3MjAgMzAwIiBmb250LWZhbWlseT0ic2Fucy1zZXJpZiIgZm9udC1zaXplPSIxMiI+CjxzdHlsZT50ZXh0e2ZpbGw6IzIyMn0uYXhpc3tzdHJva2U6Izk5OX1AbWVkaWEocHJlZmVycy1jb2xvci1zY2hlbWU6ZGFyayl7dGV4dHtmaWxsOiNkZGR9LmF4aXN7c3Ryb2tlOiM3Nzd9fTwvc3R5bGU+Cjx0ZXh0IHg9IjUyIiB5PSIyNTQiIHRleHQtYW5jaG9yPSJlbmQiPjA8L3RleHQ+CjxsaW5lIGNsYXNzPSJheGlzIiB4MT0iNjAiIHkxPSIyNTAiIHgyPSI3MDAiIHkyPSIyNTAiIHN0cm9rZS13aWR0aD0iMC41Ii8+Cjx0ZXh0IHg9IjUyIiB5PSIxOTkiIHRleHQtYW5jaG9yPSJlbmQiPjMwPC90ZXh0Pgo8bGluZSBjbGFzcz0iYXhpcyIgeDE9IjYwIiB5MT0iMTk1IiB4Mj0iNzAwIiB5Mj0iMTk1IiBzdHJva2Utd2lkdGg9IjAuNSIvPgo8dGV4dCB4PSI1MiIgeT0iMTQ0IiB0ZXh0LWFuY2hvcj0iZW5kIj42MDwvdGV4dD4KPGxpbmUgY2xhc3M9ImF4aXMiIHgxPSI2MCIgeTE9IjE0MCIgeDI9IjcwMCIgeTI9IjE0MCIgc3Ryb2tlLXdpZHRoPSIwLjUiLz4KPHRleHQgeD0iNTIiIHk9Ijg5IiB0ZXh0LWFuY2hvcj0iZW5kIj45MDwvdGV4dD4KPGxpbmUgY2xhc3M9ImF4aXMiIHgxPSI2MCIgeTE9Ijg1IiB4Mj0iNzAwIiB5Mj0iODUiIHN0cm9rZS13aWR0aD0iMC41Ii8+Cjx0ZXh0IHg9IjUyIiB5PSIzNCIgdGV4dC1hbmNob3I9ImVuZCI+MTIwPC90ZXh0Pgo8bGluZSBjbGFzcz0iYXhpcyIgeDE9IjYwIiB5MT0iMzAiIHgyPSI3MDAiIHkyPSIzMCIgc3Ryb2tlLXdpZHRoPSIwLjUiLz4KPHRleHQgeD0iNTIiIHk9IjE4IiB0ZXh0LWFuY2hvcj0iZW5kIj5NaUI8L3RleHQ+Cjx0ZXh0IHg9IjE1NiIgeT0iMTgiIHRleHQtYW5jaG9yPSJtaWRkbGUiPmZvcndhcmQ8L3RleHQ+CjxsaW5lIGNsYXNzPSJheGlzIiB4MT0iNjAiIHkxPSIzMCIgeDI9IjYwIiB5Mj0iMjUwIiBzdHJva2Utd2lkdGg9IjAuNSIvPgo8dGV4dCB4PSI0MjgiIHk9IjE4IiB0ZXh0LWFuY2hvcj0ibWlkZGxlIj5iYWNrd2FyZDwvdGV4dD4KPGxpbmUgY2xhc3M9ImF4aXMiIHgxPSIyNTIiIHkxPSIzMCIgeDI9IjI1MiIgeTI9IjI1MCIgc3Ryb2tlLXdpZHRoPSIwLjUiLz4KPHRleHQgeD0iNjUyIiB5PSIxOCIgdGV4dC1hbmNob3I9Im1pZGRsZSI+b3B0aW1pemVyPC90ZXh0Pgo8bGluZSBjbGFzcz0iYXhpcyIgeDE9IjYwNCIgeTE9IjMwIiB4Mj0iNjA0IiB5Mj0iMjUwIiBzdHJva2Utd2lkdGg9IjAuNSIvPgo8cmVjdCB4PSI2MCIgeT0iMjczIiB3aWR0aD0iMTAiIGhlaWdodD0iMTAiIGZpbGw9IiNkNjI3MjgiLz4KPHRleHQgeD0iNzUiIHk9IjI4MiIgdGV4dC1hbmNob3I9InN0YXJ0Ij51bnNoYXJkZWQ6IGF0IG1vc3QgMTE2IE1pQjwvdGV4dD4KPHBvbHlsaW5lIGZpbGw9Im5vbmUiIHN0cm9rZT0iI2Q2MjcyOCIgc3Ryb2tlLXdpZHRoPSIxLjUiIHBvaW50cz0iNjAsOTAuMyA2Miw5MC4zIDY0LDkwLjMgNjYsOTAuMyA2OCw4OS44IDcwLDg3LjEgNzIsODYuMSA3NCw4Ni4xIDc2LDg2LjEgNzgsODYuMSA4MCw4NS40IDgyLDg0LjcgODQsODQuNyA4Niw4NC4yIDg4LDg0LjEgOTAsODMuNSA5Miw4My4wIDk0LDgxLjQgOTYsODEuOSA5OCw4MS40IDEwMCw4MS40IDEwMiw4MS40IDEwNCw4MS40IDEwNiw4MS40IDEwOCw4MS40IDExMCw4MS40IDExMiw4MS40IDExNCw4MS40IDExNiw4MS40IDExOCw4MS40IDEyMCw4MS40IDEyMiw4MS40IDEyNCw4MS40IDEyNiw4MS40IDEyOCw4MS40IDEzMCw4MS40IDEzMiw4MS40IDEzNCw4MS40IDEzNiw4MS40IDEzOCw4MS40IDE0MCw4MS40IDE0Miw4MS40IDE0NCw4MS40IDE0Niw4MS40IDE0OCw4MS40IDE1MCw4MS40IDE1Miw4MS40IDE1NCw4MS40IDE1Niw4MS40IDE1OCw4MS40IDE2MCw4MS40IDE2Miw4MS40IDE2NCw4MS40IDE2Niw4MS40IDE2OCw4MS40IDE3MCw4MS40IDE3Miw4MS40IDE3NCw4MS40IDE3Niw4MS40IDE3OCw4MS40IDE4MCw4MS40IDE4Miw4MS40IDE4NCw4MS40IDE4Niw4MS40IDE4OCw4MS40IDE5MCw4MS40IDE5Miw4MS40IDE5NCw4MS40IDE5Niw4MS40IDE5OCw4MS40IDIwMCw4MS40IDIwMiw4MS40IDIwNCw3OS4xIDIwNiw3OS4xIDIwOCw3OS4xIDIxMCw3OS4xIDIxMiw3OS4xIDIxNCw3NC4wIDIxNiw3NC4wIDIxOCw3NC4wIDIyMCw3NC4wIDIyMiw3NC4wIDIyNCw3NC4wIDIyNiw3NC4wIDIyOCw3NC4wIDIzMCw3NC4wIDIzMiw3NC4wIDIzNCw3NC4wIDIzNiw3MS4yIDIzOCw3MS4yIDI0MCw3MS4yIDI0Miw3MS4yIDI0NCw3MS4yIDI0Niw3MS4yIDI0OCw3MS4yIDI1MCw3MS4yIDI1Miw2Ni45IDI1NCw2Ni45IDI1Niw2Ni45IDI1OCw2Ni45IDI2MCw2NC45IDI2Miw2NC45IDI2NCw2NC45IDI2Niw2NC45IDI2OCw2NC45IDI3MCw2NC45IDI3Miw2NC45IDI3NCw2NC45IDI3Niw2NC45IDI3OCw2NC45IDI4MCw2NC45IDI4Miw2NC45IDI4NCw2NC45IDI4Niw2NC45IDI4OCw2My45IDI5MCw2My45IDI5Miw2My45IDI5NCw2My45IDI5Niw2My45IDI5OCw2My45IDMwMCw2My45IDMwMiw2My45IDMwNCw2My45IDMwNiw2My4xIDMwOCw2My4xIDMxMCw2My4xIDMxMiw2My4xIDMxNCw2My4xIDMxNiw2MS4xIDMxOCw2MS4xIDMyMCw2MS4xIDMyMiw2MS4xIDMyNCw2MS4xIDMyNiw2MS4xIDMyOCw2MS4xIDMzMCw2MS4xIDMzMiw2MS4xIDMzNCw2MS4xIDMzNiw2MS4xIDMzOCw2MS4xIDM0MCw2MS4xIDM0Miw2MS4xIDM0NCw2MC4yIDM0Niw1OC40IDM0OCw2MC4xIDM1MCw2MC4xIDM1Miw1OC40IDM1NCw1OC40IDM1Niw1OC40IDM1OCw1OC40IDM2MCw1OC40IDM2Miw1OC40IDM2NCw1OC40IDM2Niw1OC40IDM2OCw1OC40IDM3MCw1OC40IDM3Miw1OC40IDM3NCw1OC40IDM3Niw1NC43IDM3OCw1NC43IDM4MCw1NC43IDM4Miw1NC43IDM4NCw1NC43IDM4Niw1NC43IDM4OCw1NC43IDM5MCw1NC43IDM5Miw1NC43IDM5NCw1NC43IDM5Niw1NC43IDM5OCw1NC43IDQwMCw1NC43IDQwMiw1NS4xIDQwNCw1NS4xIDQwNiw1NC43IDQwOCw1NS4wIDQxMCw1NS4xIDQxMiw1NS4zIDQxNCw1NS41IDQxNiw1NS41IDQxOCw1NS41IDQyMCw1NS4wIDQyMiw1NC42IDQyNCw1NC42IDQyNiw1NC41IDQyOCw1NC41IDQzMCw1My4xIDQzMiw1My4xIDQzNCw1My4xIDQzNiw1My4xIDQzOCw1MS4zIDQ0MCw1Mi42IDQ0Miw1Mi42IDQ0NCw1Mi42IDQ0Niw1Mi42IDQ0OCw1My41IDQ1MCw1My41IDQ1Miw1My41IDQ1NCw1My4wIDQ1Niw1My4wIDQ1OCw1My4wIDQ2MCw1My4wIDQ2Miw1My4wIDQ2NCw1My4wIDQ2Niw1My4wIDQ2OCw1My4wIDQ3MCw1My4wIDQ3Miw1My4wIDQ3NCw1My4wIDQ3Niw1My4wIDQ3OCw1My4wIDQ4MCw1My4wIDQ4Miw1My4wIDQ4NCw1My4wIDQ4Niw1Mi4wIDQ4OCw1MC4yIDQ5MCw1MS45IDQ5Miw1MS45IDQ5NCw1MS45IDQ5Niw1MS45IDQ5OCw1MS45IDUwMCw1Mi42IDUwMiw1Mi40IDUwNCw1Mi40IDUwNiw1Mi40IDUwOCw1MC4yIDUxMCw1MC4yIDUxMiw1MC4yIDUxNCw1MC4yIDUxNiw1MC4yIDUxOCw1MC4yIDUyMCw1MC4yIDUyMiw1MC4yIDUyNCw0Ny41IDUyNiw0OS4yIDUyOCw0OS4yIDUzMCw0OS43IDUzMiw0OS43IDUzNCw0OS43IDUzNiw0OS43IDUzOCw0Ny41IDU0MCw0Ny41IDU0Miw0Ny41IDU0NCw0Ny41IDU0Niw0NS40IDU0OCw0NS40IDU1MCw0NS40IDU1Miw0NS40IDU1NCw0NS40IDU1Niw0NS40IDU1OCw0NS40IDU2MCw0NS40IDU2Miw0NS40IDU2NCw0NS40IDU2Niw0NS40IDU2OCw0NS40IDU3MCw0NC44IDU3Miw0NC44IDU3NCw0NC44IDU3Niw0NC44IDU3OCw0NC44IDU4MCwzNy4xIDU4MiwzNy4xIDU4NCwzNy4xIDU4NiwzNy4xIDU4OCwzNy4xIDU5MCwzNy4xIDU5MiwzNy4xIDU5NCwzNy4xIDU5Niw0MC45IDU5OCw0MS4wIDYwMCw0MS4zIDYwMiw0MS4zIDYwNCw0MS4zIDYwNiwzNy43IDYwOCwzNy43IDYxMCwzNy43IDYxMiw0MS4zIDYxNCw0MS4zIDYxNiw0MS4zIDYxOCw0MS4zIDYyMCw0MS4zIDYyMiw0MS4zIDYyNCw0MS4zIDYyNiw0NS4xIDYyOCw0NS4xIDYzMCw0NS4xIDYzMiw0NS4xIDYzNCw0NS4xIDYzNiw0NS4xIDYzOCw0NS4xIDY0MCw1MS41IDY0Miw1MS41IDY0NCw1MS41IDY0Niw1MS41IDY0OCw1MS41IDY1MCw1MS41IDY1Miw1MS41IDY1NCw1MS41IDY1Niw1MS41IDY1OCw2MS42IDY2MCw2MS42IDY2Miw2MS42IDY2NCw2MS42IDY2Niw2MS42IDY2OCw2MS42IDY3MCw3My4xIDY3Miw3My4xIDY3NCw3My4xIDY3Niw3My4xIDY3OCw3My4xIDY4MCw4NC4xIDY4Miw4NC4xIDY4NCw4NC4xIDY4Niw4NC4xIDY4OCw4NC4xIDY5MCw4NC4xIDY5Miw4NC4xIDY5NCw4NC4xIDY5Niw4OS4xIDY5OCw4OS4xIi8+CjxyZWN0IHg9IjI1NCIgeT0iMjczIiB3aWR0aD0iMTAiIGhlaWdodD0iMTAiIGZpbGw9IiMxZjc3YjQiLz4KPHRleHQgeD0iMjY5IiB5PSIyODIiIHRleHQtYW5jaG9yPSJzdGFydCI+MSBvZiA0IHJhbmtzOiBhdCBtb3N0IDQ5IE1pQjwvdGV4dD4KPHBvbHlsaW5lIGZpbGw9Im5vbmUiIHN0cm9rZT0iIzFmNzdiNCIgc3Ryb2tlLXdpZHRoPSIxLjUiIHBvaW50cz0iNjAsMjA4LjUgNjIsMjA4LjUgNjQsMjAwLjkgNjYsMjAwLjggNjgsMjAwLjggNzAsMjAwLjggNzIsMjAwLjggNzQsMjAwLjggNzYsMjAwLjggNzgsMjAwLjggODAsMTk1LjMgODIsMTk0LjEgODQsMTkwLjEgODYsMTkwLjEgODgsMTkwLjEgOTAsMTkwLjEgOTIsMTkwLjEgOTQsMTkwLjEgOTYsMTkwLjEgOTgsMTkwLjEgMTAwLDE5MC4xIDEwMiwxOTAuMSAxMDQsMTg5LjUgMTA2LDE4OC44IDEwOCwxODYuNyAxMTAsMTg2LjcgMTEyLDE4Ni43IDExNCwxODYuNyAxMTYsMTg2LjcgMTE4LDE4Ni43IDEyMCwxODYuNyAxMjIsMTg2LjcgMTI0LDE4Ni43IDEyNiwxODYuNyAxMjgsMTg2LjcgMTMwLDE4Ni43IDEzMiwxODMuNyAxMzQsMTgzLjcgMTM2LDE4My43IDEzOCwxODMuNyAxNDAsMTgzLjcgMTQyLDE4My4xIDE0NCwxODAuOSAxNDYsMTgwLjkgMTQ4LDE4MC45IDE1MCwxODAuOSAxNTIsMTgwLjkgMTU0LDE4MC45IDE1NiwxODAuOSAxNTgsMTgwLjkgMTYwLDE4MC45IDE2MiwxNzkuNCAxNjQsMTc2LjMgMTY2LDE3Ni4zIDE2OCwxNzYuMyAxNzAsMTc2LjQgMTcyLDE3Ni40IDE3NCwxNzYuNCAxNzYsMTc2LjQgMTc4LDE3Ni40IDE4MCwxNzYuNCAxODIsMTc2LjQgMTg0LDE3Ni40IDE4NiwxNzYuNCAxODgsMTc2LjQgMTkwLDE3Ni40IDE5MiwxNzYuNCAxOTQsMTc1LjcgMTk2LDE3NS4xIDE5OCwxNzIuMiAyMDAsMTcyLjIgMjAyLDE3Mi4yIDIwNCwxNzIuMiAyMDYsMTcyLjIgMjA4LDE3Mi4yIDIxMCwxNzIuMiAyMTIsMTcyLjIgMjE0LDE3Mi4yIDIxNiwxNzIuMiAyMTgsMTcyLjIgMjIwLDE3Mi4yIDIyMiwxNzIuMiAyMjQsMTcyLjIgMjI2LDE3Mi4yIDIyOCwxNzIuMiAyMzAsMTcyLjIgMjMyLDE3Mi4yIDIzNCwxNzIuMiAyMzYsMTcyLjIgMjM4LDE3Ni44IDI0MCwxNzYuOCAyNDIsMTc2LjggMjQ0LDE3Ni44IDI0NiwxNzYuOCAyNDgsMTc2LjggMjUwLDE3Ni44IDI1MiwxNzQuOSAyNTQsMTY5LjMgMjU2LDE2OS4zIDI1OCwxNjkuMyAyNjAsMTY5LjMgMjYyLDE2OS4zIDI2NCwxNjkuMyAyNjYsMTY5LjMgMjY4LDE2OS4zIDI3MCwxNjkuMyAyNzIsMTY5LjMgMjc0LDE2OS4zIDI3NiwxNjkuMyAyNzgsMTY2LjQgMjgwLDE2Ni40IDI4MiwxNjYuNCAyODQsMTY2LjQgMjg2LDE2NC42IDI4OCwxNjYuMyAyOTAsMTYzLjYgMjkyLDE2My42IDI5NCwxNjMuNiAyOTYsMTYzLjYgMjk4LDE2My42IDMwMCwxNjMuNiAzMDIsMTYzLjYgMzA0LDE2My42IDMwNiwxNjMuNiAzMDgsMTYzLjYgMzEwLDE2My42IDMxMiwxNjMuNiAzMTQsMTYzLjYgMzE2LDE2My42IDMxOCwxNTkuMiAzMjAsMTU5LjIgMzIyLDE1OS4yIDMyNCwxNTkuMiAzMjYsMTU5LjIgMzI4LDE1OS4yIDMzMCwxNTkuMiAzMzIsMTU5LjIgMzM0LDE1OS4yIDMzNiwxNTkuMiAzMzgsMTU5LjIgMzQwLDE1OS4yIDM0MiwxNTkuMiAzNDQsMTU5LjIgMzQ2LDE1OS4yIDM0OCwxNTkuMiAzNTAsMTU5LjIgMzUyLDE1OS4yIDM1NCwxNTkuMiAzNTYsMTU5LjIgMzU4LDE1OS4yIDM2MCwxNjQuNyAzNjIsMTY1LjMgMzY0LDE2NS4zIDM2NiwxNjUuMyAzNjgsMTY1LjMgMzcwLDE2NS4zIDM3MiwxNjUuMyAzNzQsMTY0LjMgMzc2LDE2MS4wIDM3OCwxNjEuMCAzODAsMTYxLjAgMzgyLDE2Ni41IDM4NCwxNjYuNSAzODYsMTY2LjUgMzg4LDE2Ni41IDM5MCwxNjYuNSAzOTIsMTY2LjUgMzk0LDE2Ni41IDM5NiwxNjMuOCAzOTgsMTY1LjggNDAwLDE2NS4zIDQwMiwxNjIuNiA0MDQsMTYyLjEgNDA2LDE2Mi40IDQwOCwxNTkuNyA0MTAsMTYxLjQgNDEyLDE2MS4yIDQxNCwxNjIuMSA0MTYsMTY3LjcgNDE4LDE2Ny43IDQyMCwxNjcuNyA0MjIsMTY3LjcgNDI0LDE2Ny43IDQyNiwxNjcuNyA0MjgsMTY3LjcgNDMwLDE2Ny43IDQzMiwxNjcuNyA0MzQsMTczLjIgNDM2LDE3My4yIDQzOCwxNzMuMiA0NDAsMTczLjIgNDQyLDE3My4yIDQ0NCwxNjQuMCA0NDYsMTYzLjUgNDQ4LDE2NC40IDQ1MCwxNjQuNCA0NTIsMTY0LjQgNDU0LDE2NC40IDQ1NiwxNjQuNSA0NTgsMTY0LjUgNDYwLDE2NC41IDQ2MiwxNjQuNSA0NjQsMTY0LjUgNDY2LDE2NC41IDQ2OCwxNjQuNSA0NzAsMTYxLjEgNDcyLDE2MS4xIDQ3NCwxNjYuNyA0NzYsMTY2LjcgNDc4LDE2Ni43IDQ4MCwxNjUuNCA0ODIsMTY1LjQgNDg0LDE2NS40IDQ4NiwxNjUuNCA0ODgsMTY1LjQgNDkwLDE2NS40IDQ5MiwxNjUuNSA0OTQsMTY1LjUgNDk2LDE2NS41IDQ5OCwxNjUuNSA1MDAsMTY1LjAgNTAyLDE2NC40IDUwNCwxNjQuNCA1MDYsMTY0LjcgNTA4LDE2NC4xIDUxMCwxNzYuMSA1MTIsMTc2LjEgNTE0LDE3Ni4xIDUxNiwxNzYuMSA1MTgsMTc2LjEgNTIwLDE2Ni45IDUyMiwxNjYuOCA1MjQsMTY2LjggNTI2LDE2Ni44IDUyOCwxNjYuOCA1MzAsMTY2LjggNTMyLDE2Ni44IDUzNCwxNjYuOCA1MzYsMTY2LjggNTM4LDE2Ni44IDU0MCwxNjUuNiA1NDIsMTcyLjAgNTQ0LDE3Mi4wIDU0NiwxNzIuMCA1NDgsMTcyLjAgNTUwLDE3Mi4wIDU1MiwxNjguNyA1NTQsMTgwLjAgNTU2LDE4MC4wIDU1OCwxODAuMCA1NjAsMTgwLjAgNTYyLDE4MC4wIDU2NCwxODAuMCA1NjYsMTgwLjAgNTY4LDE4MC4wIDU3MCwxODAuMCA1NzIsMTgwLjAgNTc0LDE4MC4wIDU3NiwxODAuMCA1NzgsMTg0LjEgNTgwLDE4OS42IDU4MiwxODguMyA1ODQsMTkyLjAgNTg2LDE5NS44IDU4OCwxOTUuOCA1OTAsMTk1LjggNTkyLDE5NS44IDU5NCwxOTUuOCA1OTYsMTk1LjggNTk4LDE5NS44IDYwMCwxOTUuOCA2MDIsMTk1LjggNjA0LDE5NS44IDYwNiwxOTUuMiA2MDgsMTk1LjYgNjEwLDE5NS4yIDYxMiwxOTUuMiA2MTQsMTk1LjUgNjE2LDE5NS41IDYxOCwxOTUuNSA2MjAsMTk1LjUgNjIyLDE5NS41IDYyNCwxOTUuNSA2MjYsMTk1LjUgNjI4LDE5NS41IDYzMCwxOTUuNSA2MzIsMTk1LjUgNjM0LDE5NS41IDYzNiwxOTUuNSA2MzgsMTk1LjUgNjQwLDE5NS41IDY0MiwxOTUuNSA2NDQsMTk1LjUgNjQ2LDE5NS41IDY0OCwxOTUuNSA2NTAsMTk1LjUgNjUyLDE5NS41IDY1NCwxOTUuNSA2NTYsMTk1LjUgNjU4LDE5NS41IDY2MCwxOTUuNSA2NjIsMTk1LjUgNjY0LDE5NS41IDY2NiwxOTUuNSA2NjgsMTk1LjUgNjcwLDE5NS41IDY3MiwxOTUuNSA2NzQsMTk1LjUgNjc2LDE5NS41IDY3OCwxOTUuNSA2ODAsMTk1LjUgNjgyLDE5NS41IDY4NCwxOTUuNSA2ODYsMTk1LjUgNjg4LDE5NS41IDY5MCwxOTUuNSA2OTIsMTk1LjUgNjk0LDE5NS41IDY5NiwxOTUuNSA2OTgsMTk1LjUiLz4KPHJlY3QgeD0iNDYyIiB5PSIyNzMiIHdpZHRoPSIxMCIgaGVpZ2h0PSIxMCIgZmlsbD0iIzJjYTAyYyIvPgo8dGV4dCB4PSI0NzciIHk9IjI4MiIgdGV4dC1hbmNob3I9InN0YXJ0Ij5zdGVwcGVkIGluIGJhY2t3YXJkOiBhdCBtb3N0IDQ4IE1pQjwvdGV4dD4KPHBvbHlsaW5lIGZpbGw9Im5vbmUiIHN0cm9rZT0iIzJjYTAyYyIgc3Ryb2tlLXdpZHRoPSIxLjUiIHBvaW50cz0iNjAsMjA4LjUgNjIsMjA4LjUgNjQsMjA4LjUgNjYsMjA4LjUgNjgsMjA4LjUgNzAsMjA4LjUgNzIsMjAwLjggNzQsMjAwLjggNzYsMjAwLjggNzgsMjAwLjggODAsMjAwLjggODIsMTk1LjMgODQsMTk1LjMgODYsMTk1LjMgODgsMTk1LjMgOTAsMTk1LjMgOTIsMTk1LjMgOTQsMTk1LjMgOTYsMTk1LjMgOTgsMTk1LjMgMTAwLDE5Mi4zIDEwMiwxOTAuMCAxMDQsMTkwLjAgMTA2LDE5MC4wIDEwOCwxOTAuMCAxMTAsMTkwLjAgMTEyLDE5MC4wIDExNCwxOTAuMCAxMTYsMTkwLjAgMTE4LDE5MC4wIDEyMCwxOTAuMCAxMjIsMTkwLjAgMTI0LDE5MC4wIDEyNiwxOTAuMCAxMjgsMTkwLjAgMTMwLDE5MC4wIDEzMiwxOTAuMCAxMzQsMTkwLjAgMTM2LDE5MC4wIDEzOCwxODcuMSAxNDAsMTg0LjMgMTQyLDE4NC4zIDE0NCwxODQuMyAxNDYsMTg0LjMgMTQ4LDE4NC4zIDE1MCwxODQuMyAxNTIsMTg0LjMgMTU0LDE4NC4zIDE1NiwxODQuMyAxNTgsMTg0LjMgMTYwLDE4NC4zIDE2MiwxODQuMyAxNjQsMTgzLjcgMTY2LDE4Mi4yIDE2OCwxODIuMiAxNzAsMTgyLjIgMTcyLDE4Mi4yIDE3NCwxODIuMiAxNzYsMTgyLjIgMTc4LDE4MC44IDE4MCwxNzcuOSAxODIsMTgzLjUgMTg0LDE4My41IDE4NiwxODMuNSAxODgsMTgzLjUgMTkwLDE4My41IDE5MiwxODMuNSAxOTQsMTgzLjUgMTk2LDE4My41IDE5OCwxODMuNSAyMDAsMTgzLjUgMjAyLDE4My41IDIwNCwxODMuNSAyMDYsMTgzLjUgMjA4LDE4My41IDIxMCwxODMuNSAyMTIsMTgzLjUgMjE0LDE3NS4xIDIxNiwxNzIuMyAyMTgsMTcyLjggMjIwLDE3Mi44IDIyMiwxNzIuOCAyMjQsMTcyLjggMjI2LDE3Mi44IDIyOCwxNzIuOCAyMzAsMTcyLjggMjMyLDE3Mi44IDIzNCwxNzIuOCAyMzYsMTcyLjggMjM4LDE3Mi4zIDI0MCwxNzIuMiAyNDIsMTc2LjggMjQ0LDE3Ni44IDI0NiwxNzYuOCAyNDgsMTc2LjggMjUwLDE3Ni44IDI1MiwxNzQuNSAyNTQsMTc1LjMgMjU2LDE3NS4zIDI1OCwxNzUuMyAyNjAsMTc1LjMgMjYyLDE3NS4zIDI2NCwxNzUuMyAyNjYsMTc1LjMgMjY4LDE3NS4zIDI3MCwxNzUuMyAyNzIsMTc1LjMgMjc0LDE2OC45IDI3NiwxNjYuMCAyNzgsMTY2LjAgMjgwLDE2Ni4wIDI4MiwxNjYuMCAyODQsMTY2LjAgMjg2LDE2Ni4wIDI4OCwxNjYuMCAyOTAsMTY2LjAgMjkyLDE2Ni4wIDI5NCwxNjYuMCAyOTYsMTY2LjAgMjk4LDE2Ni4wIDMwMCwxNjYuMCAzMDIsMTY2LjAgMzA0LDE2NC4yIDMwNiwxNjQuOSAzMDgsMTY1LjIgMzEwLDE2NS4yIDMxMiwxNjUuMiAzMTQsMTY1LjIgMzE2LDE2NS4yIDMxOCwxNjUuMiAzMjAsMTY1LjIgMzIyLDE2NS4yIDMyNCwxNjQuNyAzMjYsMTYzLjIgMzI4LDE2My4yIDMzMCwxNjMuMiAzMzIsMTYzLjIgMzM0LDE2My4yIDMzNiwxNjAuNSAzMzgsMTYwLjYgMzQwLDE2MC42IDM0MiwxNjAuNiAzNDQsMTYwLjYgMzQ2LDE2MC42IDM0OCwxNjAuNiAzNTAsMTYwLjYgMzUyLDE2MC42IDM1NCwxNjAuNiAzNTYsMTYwLjYgMzU4LDE2MC42IDM2MCwxNjAuNiAzNjIsMTY2LjIgMzY0LDE2Ni4yIDM2NiwxNjYuMiAzNjgsMTY2LjIgMzcwLDE2Ni4yIDM3MiwxNjYuMiAzNzQsMTY2LjIgMzc2LDE2Ni4yIDM3OCwxNjQuMyAzODAsMTYzLjMgMzgyLDE2NS45IDM4NCwxNjUuOSAzODYsMTY1LjkgMzg4LDE2NS45IDM5MCwxNjUuOSAzOTIsMTY1LjkgMzk0LDE2NS45IDM5NiwxNjUuOSAzOTgsMTY1LjkgNDAwLDE2NS45IDQwMiwxNjUuOSA0MDQsMTY1LjkgNDA2LDE2My41IDQwOCwxNjEuNyA0MTAsMTYzLjkgNDEyLDE2My45IDQxNCwxNjMuOSA0MTYsMTYzLjkgNDE4LDE2OS41IDQyMCwxNjkuNSA0MjIsMTY5LjUgNDI0LDE2OS41IDQyNiwxNjkuNSA0MjgsMTY5LjUgNDMwLDE2OS41IDQzMiwxNjkuNSA0MzQsMTY5LjUgNDM2LDE2OS41IDQzOCwxNjkuNSA0NDAsMTY5LjUgNDQyLDE2Ni4xIDQ0NCwxNjcuNyA0NDYsMTczLjcgNDQ4LDE3My43IDQ1MCwxNzMuNyA0NTIsMTczLjcgNDU0LDE3My43IDQ1NiwxNzIuOCA0NTgsMTY1LjkgNDYwLDE2Ni44IDQ2MiwxNjYuOCA0NjQsMTY2LjggNDY2LDE2Ni44IDQ2OCwxNzIuMyA0NzAsMTcyLjMgNDcyLDE3MS43IDQ3NCwxNjkuMCA0NzYsMTcwLjUgNDc4LDE3MC41IDQ4MCwxNzIuMCA0ODIsMTcwLjIgNDg0LDE3MC4yIDQ4NiwxNzIuNSA0ODgsMTcxLjkgNDkwLDE3MS45IDQ5MiwxNzEuOSA0OTQsMTY5LjEgNDk2LDE3MC45IDQ5OCwxNzEuMiA1MDAsMTcxLjIgNTAyLDE3NC40IDUwNCwxNzQuNCA1MDYsMTczLjYgNTA4LDE3My42IDUxMCwxNzMuNiA1MTIsMTczLjEgNTE0LDE3My44IDUxNiwxODAuMCA1MTgsMTgwLjAgNTIwLDE4MC4wIDUyMiwxODAuMCA1MjQsMTgwLjAgNTI2LDE4MC4wIDUyOCwxODAuMCA1MzAsMTgwLjAgNTMyLDE4MC4wIDUzNCwxODAuMCA1MzYsMTgwLjAgNTM4LDE4MC4wIDU0MCwxODAuMCA1NDIsMTg1LjUgNTQ0LDE4OS4zIDU0NiwxODkuMyA1NDgsMTg5LjMgNTUwLDE4OS4zIDU1MiwxODkuMyA1NTQsMTg5LjMgNTU2LDE4OS4zIDU1OCwxODkuMyA1NjAsMTg5LjMgNTYyLDE4OS4zIDU2NCwxODkuMyA1NjYsMTg5LjMgNTY4LDE4OS4zIDU3MCwxODkuMyA1NzIsMTg5LjMgNTc0LDE4OS4zIDU3NiwxOTMuNCA1NzgsMTk0LjggNTgwLDE5NC44IDU4MiwxOTQuOCA1ODQsMTk0LjggNTg2LDE5NC44IDU4OCwxOTQuOCA1OTAsMjA4LjYgNTkyLDIwOC42IDU5NCwyMDguNiA1OTYsMjA4LjYgNTk4LDIwOC42IDYwMCwyMDguNiA2MDIsMjA4LjYiLz4KPC9zdmc+Cg=="]
#[doc = "[quick-start.md]: crate::book::quick_start"]
#[doc = "[guides/data-parallel.md]: crate::book::data_parallel"]
#[doc = "[guides/tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = "[guides/experts.md]: crate::book::experts"]
#[doc = "[guides/fsdp.md]: crate::book::fsdp"]
#[doc = ""]
#[doc = include_str!("../docs/introduction.md")]
pub mod introduction {}

#[doc = "[guides/burn-train.md]: crate::book::burn_train"]
#[doc = "[guides/checkpoints.md]: crate::book::checkpoints"]
#[doc = "[guides/clusters.md]: crate::book::clusters"]
#[doc = "[guides/data-parallel.md]: crate::book::data_parallel"]
#[doc = "[guides/data.md]: crate::book::data"]
#[doc = "[guides/evaluation.md]: crate::book::evaluation"]
#[doc = "[guides/fsdp.md]: crate::book::fsdp"]
#[doc = "[guides/gpus.md]: crate::book::gpus"]
#[doc = "[guides/pretrained.md]: crate::book::pretrained"]
#[doc = "[guides/saving.md]: crate::book::saving"]
#[doc = "[guides/tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = "[guides/wrong-loss.md]: crate::book::wrong_loss"]
#[doc = "[troubleshooting.md]: crate::book::troubleshooting"]
#[doc = ""]
#[doc = include_str!("../docs/quick-start.md")]
pub mod quick_start {}

#[doc = ""]
#[doc = include_str!("../docs/concepts.md")]
pub mod concepts {}

#[doc = "[guides/burn-train.md]: crate::book::burn_train"]
#[doc = "[guides/checkpoints.md]: crate::book::checkpoints"]
#[doc = "[guides/checkpoints.md#hugging-face-and-python]: crate::book::checkpoints#hugging-face-and-python"]
#[doc = "[guides/data-parallel.md]: crate::book::data_parallel"]
#[doc = "[guides/data.md]: crate::book::data"]
#[doc = "[guides/evaluation.md]: crate::book::evaluation"]
#[doc = "[guides/fsdp.md]: crate::book::fsdp"]
#[doc = "[guides/mixed-precision.md]: crate::book::mixed_precision"]
#[doc = "[guides/optimizers.md#fused-steps]: crate::book::optimizers#fused-steps"]
#[doc = "[guides/optimizers.md#schedules-and-averages]: crate::book::optimizers#schedules-and-averages"]
#[doc = "[guides/optimizers.md#steps-in-backward]: crate::book::optimizers#steps-in-backward"]
#[doc = "[guides/pretrained.md]: crate::book::pretrained"]
#[doc = "[guides/tensor-parallelism.md#on-one-device]: crate::book::tensor_parallelism#on-one-device"]
#[doc = "[guides/wrong-loss.md]: crate::book::wrong_loss"]
#[doc = "[parity.md]: crate::book::parity"]
#[doc = ""]
#[doc = include_str!("../docs/from-pytorch.md")]
pub mod from_pytorch {}

#[doc = "[../limits.md#data-parallelism]: crate::book::limits#data-parallelism"]
#[doc = "[burn-train.md]: crate::book::burn_train"]
#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[data.md]: crate::book::data"]
#[doc = "[experts.md]: crate::book::experts"]
#[doc = "[fsdp.md]: crate::book::fsdp"]
#[doc = "[gradient-accumulation.md]: crate::book::gradient_accumulation"]
#[doc = "[mixed-precision.md]: crate::book::mixed_precision"]
#[doc = "[optimizers.md#steps-in-backward]: crate::book::optimizers#steps-in-backward"]
#[doc = "[tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = ""]
#[doc = include_str!("../docs/guides/data-parallel.md")]
pub mod data_parallel {}

#[doc = "[data-parallel.md#gradient-hooks]: crate::book::data_parallel#gradient-hooks"]
#[doc = "[data-parallel.md#ranks-with-different-numbers-of-rows]: crate::book::data_parallel#ranks-with-different-numbers-of-rows"]
#[doc = "[optimizers.md]: crate::book::optimizers"]
#[doc = "[pretrained.md]: crate::book::pretrained"]
#[doc = "[wrong-loss.md]: crate::book::wrong_loss"]
#[doc = ""]
#[doc = include_str!("../docs/guides/fsdp.md")]
pub mod fsdp {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[gradient-accumulation.md]: crate::book::gradient_accumulation"]
#[doc = ""]
#[doc = include_str!("../docs/guides/optimizers.md")]
pub mod optimizers {}

#[doc = "[../troubleshooting.md]: crate::book::troubleshooting"]
#[doc = "[burn-train.md]: crate::book::burn_train"]
#[doc = "[data-parallel.md#ranks-with-different-numbers-of-rows]: crate::book::data_parallel#ranks-with-different-numbers-of-rows"]
#[doc = "[experts.md]: crate::book::experts"]
#[doc = "[tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = ""]
#[cfg_attr(any(not(doctest), feature = "dataset"), doc = include_str!("../docs/guides/data.md"))]
pub mod data {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[data.md]: crate::book::data"]
#[doc = "[evaluation.md]: crate::book::evaluation"]
#[doc = "[experts.md]: crate::book::experts"]
#[doc = "[saving.md]: crate::book::saving"]
#[doc = ""]
#[cfg_attr(any(not(doctest), feature = "train"), doc = include_str!("../docs/guides/burn-train.md"))]
pub mod burn_train {}

#[doc = "[wrong-loss.md]: crate::book::wrong_loss"]
#[doc = ""]
#[doc = include_str!("../docs/guides/mixed-precision.md")]
pub mod mixed_precision {}

#[doc = "[burn-train.md]: crate::book::burn_train"]
#[doc = "[data-parallel.md]: crate::book::data_parallel"]
#[doc = "[optimizers.md#steps-in-backward]: crate::book::optimizers#steps-in-backward"]
#[doc = ""]
#[doc = include_str!("../docs/guides/gradient-accumulation.md")]
pub mod gradient_accumulation {}

#[doc = ""]
#[doc = include_str!("../docs/guides/activation-checkpointing.md")]
pub mod activation_checkpointing {}

#[doc = ""]
#[doc = include_str!("../docs/guides/offload.md")]
pub mod offload {}

#[doc = "[burn-train.md]: crate::book::burn_train"]
#[doc = "[data.md]: crate::book::data"]
#[doc = "[tensor-parallelism.md#on-one-device]: crate::book::tensor_parallelism#on-one-device"]
#[doc = ""]
#[doc = include_str!("../docs/guides/evaluation.md")]
pub mod evaluation {}

#[doc = "[data.md]: crate::book::data"]
#[doc = "[wrong-loss.md]: crate::book::wrong_loss"]
#[doc = ""]
#[doc = include_str!("../docs/guides/tensor-parallelism.md")]
pub mod tensor_parallelism {}

#[doc = "[burn-train.md]: crate::book::burn_train"]
#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = ""]
#[doc = include_str!("../docs/guides/experts.md")]
pub mod experts {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[checkpoints.md#hugging-face-and-python]: crate::book::checkpoints#hugging-face-and-python"]
#[doc = "[pretrained.md]: crate::book::pretrained"]
#[doc = "[pretrained.md#from-safetensors-and-back]: crate::book::pretrained#from-safetensors-and-back"]
#[doc = "[saving.md]: crate::book::saving"]
#[doc = "[failures.md]: crate::book::failures"]
#[doc = ""]
#[doc = include_str!("../docs/guides/checkpoints.md")]
pub mod checkpoints {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[checkpoints.md#hugging-face-and-python]: crate::book::checkpoints#hugging-face-and-python"]
#[doc = "[pretrained.md]: crate::book::pretrained"]
#[doc = "[pretrained.md#from-safetensors-and-back]: crate::book::pretrained#from-safetensors-and-back"]
#[doc = ""]
#[doc = include_str!("../docs/guides/saving.md")]
pub mod saving {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[checkpoints.md#hugging-face-and-python]: crate::book::checkpoints#hugging-face-and-python"]
#[doc = "[lora.md]: crate::book::lora"]
#[doc = "[pretrained.md]: crate::book::pretrained"]
#[doc = "[pretrained.md#from-safetensors-and-back]: crate::book::pretrained#from-safetensors-and-back"]
#[doc = "[saving.md]: crate::book::saving"]
#[doc = ""]
#[doc = include_str!("../docs/guides/pretrained.md")]
pub mod pretrained {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[pretrained.md]: crate::book::pretrained"]
#[doc = "[saving.md]: crate::book::saving"]
#[doc = ""]
#[doc = include_str!("../docs/guides/lora.md")]
pub mod lora {}

#[doc = "[checkpoints.md]: crate::book::checkpoints"]
#[doc = "[failures.md]: crate::book::failures"]
#[doc = ""]
#[doc = include_str!("../docs/guides/clusters.md")]
pub mod clusters {}

#[doc = "[../limits.md#gpus]: crate::book::limits#gpus"]
#[doc = "[../performance.md#memory]: crate::book::performance#memory"]
#[doc = "[../performance.md#on-an-nvidia-h200]: crate::book::performance#on-an-nvidia-h200"]
#[doc = "[clusters.md]: crate::book::clusters"]
#[doc = "[failures.md]: crate::book::failures"]
#[doc = "[mixed-precision.md]: crate::book::mixed_precision"]
#[doc = "[wrong-loss.md]: crate::book::wrong_loss"]
#[doc = ""]
#[doc = include_str!("../docs/guides/gpus.md")]
pub mod gpus {}

#[doc = "[checkpoints.md#what-to-save]: crate::book::checkpoints#what-to-save"]
#[doc = "[clusters.md#surviving-the-loss-of-a-process]: crate::book::clusters#surviving-the-loss-of-a-process"]
#[doc = ""]
#[doc = include_str!("../docs/guides/failures.md")]
pub mod failures {}

#[doc = "[../guarantees.md]: crate::book::guarantees"]
#[doc = "[data.md]: crate::book::data"]
#[doc = "[mixed-precision.md]: crate::book::mixed_precision"]
#[doc = ""]
#[doc = include_str!("../docs/guides/wrong-loss.md")]
pub mod wrong_loss {}

#[doc = "[guides/burn-train.md]: crate::book::burn_train"]
#[doc = "[guides/clusters.md]: crate::book::clusters"]
#[doc = "[guides/data-parallel.md#ranks-with-different-numbers-of-batches]: crate::book::data_parallel#ranks-with-different-numbers-of-batches"]
#[doc = "[guides/data.md]: crate::book::data"]
#[doc = "[guides/failures.md]: crate::book::failures"]
#[doc = "[guides/fsdp.md#tied-weights]: crate::book::fsdp#tied-weights"]
#[doc = "[guides/gpus.md#memory-of-unsharded-parameters]: crate::book::gpus#memory-of-unsharded-parameters"]
#[doc = "[guides/gradient-accumulation.md]: crate::book::gradient_accumulation"]
#[doc = "[guides/mixed-precision.md]: crate::book::mixed_precision"]
#[doc = "[guides/pretrained.md]: crate::book::pretrained"]
#[doc = "[guides/saving.md]: crate::book::saving"]
#[doc = "[guides/tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = "[guides/wrong-loss.md]: crate::book::wrong_loss"]
#[doc = "[performance.md]: crate::book::performance"]
#[doc = "[step.svg]: data:image/svg+xml;base64,PHN2ZyB4bWxucz0iaHR0cDovL3d3dy53My5vcmcvMjAwMC9zdmciIHZpZXdCb3g9IjAgMCAxMTQwIDM4NiIgZm9udC1mYW1pbHk9InNhbnMtc2VyaWYiIGZvbnQtc2l6ZT0iMTEiPgo8c3R5bGU+Lm5hbWV7Zm9udC1zaXplOjEycHh9IC5mb3J3YXJke2ZpbGw6IzllY2FlMTtzdHJva2U6I2ZmZn0gLmJhY2t3YXJke2ZpbGw6IzZiYWVkNjtzdHJva2U6I2ZmZn0gLmFsbC1nYXRoZXJ7ZmlsbDojZmRhZTZifSAucmVkdWNlLXNjYXR0ZXJ7ZmlsbDojYTFkOTlifSAuYWxsLXJlZHVjZXtmaWxsOiNiY2JkZGN9PC9zdHlsZT4KPHJlY3Qgd2lkdGg9IjEwMCUiIGhlaWdodD0iMTAwJSIgZmlsbD0iI2ZmZiIvPgo8dGV4dCB4PSI0IiB5PSIyMyIgY2xhc3M9Im5hbWUiPnJhbmsgMDwvdGV4dD4KPGc+PHRpdGxlPmZvcndhcmQgcm9vdDogMTA1LjkyNyBtczwvdGl0bGU+PHJlY3QgeD0iMTMwLjciIHk9IjEwIiB3aWR0aD0iMzQ3LjUiIGhlaWdodD0iMTYiIGNsYXNzPSJmb3J3YXJkIi8+PHRleHQgeD0iMTMzLjciIHk9IjIyIj5yb290PC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjA6IDI1LjU0MSBtczwvdGl0bGU+PHJlY3QgeD0iMTU4LjciIHk9IjEwIiB3aWR0aD0iODMuOCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIxNjEuNyIgeT0iMjIiPmJsb2Nrcy4wPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjE6IDIxLjAyNCBtczwvdGl0bGU+PHJlY3QgeD0iMjQyLjYiIHk9IjEwIiB3aWR0aD0iNjkuMCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIyNDUuNiIgeT0iMjIiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjI6IDE5LjM2OSBtczwvdGl0bGU+PHJlY3QgeD0iMzExLjciIHk9IjEwIiB3aWR0aD0iNjMuNSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIzMTQuNyIgeT0iMjIiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjM6IDMwLjkyOCBtczwvdGl0bGU+PHJlY3QgeD0iMzc1LjUiIHk9IjEwIiB3aWR0aD0iMTAxLjQiIGhlaWdodD0iMTYiIGNsYXNzPSJmb3J3YXJkIi8+PHRleHQgeD0iMzc4LjUiIHk9IjIyIj5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCByb290OiAxODIuNDc0IG1zPC90aXRsZT48cmVjdCB4PSI0ODAuNiIgeT0iMTAiIHdpZHRoPSI1OTguNSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iNDgzLjYiIHk9IjIyIj5yb290PC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4zOiA1Ni4zMjkgbXM8L3RpdGxlPjxyZWN0IHg9IjQ4Mi4yIiB5PSIxMCIgd2lkdGg9IjE4NC44IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI0ODUuMiIgeT0iMjIiPmJsb2Nrcy4zPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4yOiAzNi43MTkgbXM8L3RpdGxlPjxyZWN0IHg9IjY2Ny4wIiB5PSIxMCIgd2lkdGg9IjEyMC40IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI2NzAuMCIgeT0iMjIiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4xOiA0My42NTAgbXM8L3RpdGxlPjxyZWN0IHg9Ijc4Ny41IiB5PSIxMCIgd2lkdGg9IjE0My4yIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI3OTAuNSIgeT0iMjIiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4wOiA0NS4xMDMgbXM8L3RpdGxlPjxyZWN0IHg9IjkzMC44IiB5PSIxMCIgd2lkdGg9IjE0Ny45IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI5MzMuOCIgeT0iMjIiPmJsb2Nrcy4wPC90ZXh0PjwvZz4KPHRleHQgeD0iNCIgeT0iNDMiIGNsYXNzPSJuYW1lIj5jb21tdW5pY2F0aW9uPC90ZXh0Pgo8Zz48dGl0bGU+YWxsLWdhdGhlciByb290OiA4LjM1MyBtczwvdGl0bGU+PHJlY3QgeD0iMTMwLjciIHk9IjMwIiB3aWR0aD0iMjcuNCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSIxMzMuNyIgeT0iNDIiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMDogMy4wMTYgbXM8L3RpdGxlPjxyZWN0IHg9IjE1OC4zIiB5PSIzMCIgd2lkdGg9IjkuOSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4xOiAyMi42MjIgbXM8L3RpdGxlPjxyZWN0IHg9IjE2OC41IiB5PSIzMCIgd2lkdGg9Ijc0LjIiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMTcxLjUiIHk9IjQyIj5ibG9ja3MuMTwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4yOiAyMS4wMjEgbXM8L3RpdGxlPjxyZWN0IHg9IjI0Mi44IiB5PSIzMCIgd2lkdGg9IjY5LjAiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMjQ1LjgiIHk9IjQyIj5ibG9ja3MuMjwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4zOiAxOS4zNzEgbXM8L3RpdGxlPjxyZWN0IHg9IjMxMi4wIiB5PSIzMCIgd2lkdGg9IjYzLjUiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMzE1LjAiIHk9IjQyIj5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4zOiAxMy44OTggbXM8L3RpdGxlPjxyZWN0IHg9IjQ4MC42IiB5PSIzMCIgd2lkdGg9IjQ1LjYiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMjogNTYuODY0IG1zPC90aXRsZT48cmVjdCB4PSI0ODIuMiIgeT0iNDgiIHdpZHRoPSIxODYuNSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI0ODUuMiIgeT0iNjAiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIGJsb2Nrcy4zOiAzNi43MzIgbXM8L3RpdGxlPjxyZWN0IHg9IjY2Ny4wIiB5PSIzMCIgd2lkdGg9IjEyMC41IiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48dGV4dCB4PSI2NzAuMCIgeT0iNDIiPmJsb2Nrcy4zPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjE6IDM3LjI3OCBtczwvdGl0bGU+PHJlY3QgeD0iNjY3LjAiIHk9IjY2IiB3aWR0aD0iMTIyLjMiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iNjcwLjAiIHk9Ijc4Ij5ibG9ja3MuMTwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMjogNDMuNjc1IG1zPC90aXRsZT48cmVjdCB4PSI3ODcuNSIgeT0iNDgiIHdpZHRoPSIxNDMuMyIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iNzkwLjUiIHk9IjYwIj5ibG9ja3MuMjwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4wOiA0NC40NjYgbXM8L3RpdGxlPjxyZWN0IHg9Ijc4Ny41IiB5PSIzMCIgd2lkdGg9IjE0NS45IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9Ijc5MC41IiB5PSI0MiI+YmxvY2tzLjA8L3RleHQ+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgYmxvY2tzLjE6IDQ1LjEyNyBtczwvdGl0bGU+PHJlY3QgeD0iOTMwLjciIHk9IjY2IiB3aWR0aD0iMTQ4LjAiIGhlaWdodD0iMTYiIGNsYXNzPSJyZWR1Y2Utc2NhdHRlciIvPjx0ZXh0IHg9IjkzMy43IiB5PSI3OCI+YmxvY2tzLjE8L3RleHQ+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgYmxvY2tzLjA6IDAuNDk5IG1zPC90aXRsZT48cmVjdCB4PSIxMDc4LjciIHk9IjMwIiB3aWR0aD0iMS42IiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciByb290OiAwLjQ0MyBtczwvdGl0bGU+PHJlY3QgeD0iMTA3OS4xIiB5PSI0OCIgd2lkdGg9IjEuNSIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PC9nPgo8dGV4dCB4PSI0IiB5PSIxMTEiIGNsYXNzPSJuYW1lIj5yYW5rIDE8L3RleHQ+CjxnPjx0aXRsZT5mb3J3YXJkIHJvb3Q6IDEwNC40MjkgbXM8L3RpdGxlPjxyZWN0IHg9IjEzMC4wIiB5PSI5OCIgd2lkdGg9IjM0Mi41IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjEzMy4wIiB5PSIxMTAiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+Zm9yd2FyZCBibG9ja3MuMDogMjcuMjQzIG1zPC90aXRsZT48cmVjdCB4PSIxNTcuOCIgeT0iOTgiIHdpZHRoPSI4OS40IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjE2MC44IiB5PSIxMTAiPmJsb2Nrcy4wPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjE6IDE0LjgwMiBtczwvdGl0bGU+PHJlY3QgeD0iMjQ3LjMiIHk9Ijk4IiB3aWR0aD0iNDguNiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48L2c+CjxnPjx0aXRsZT5mb3J3YXJkIGJsb2Nrcy4yOiAzMS41NTAgbXM8L3RpdGxlPjxyZWN0IHg9IjI5Ni4xIiB5PSI5OCIgd2lkdGg9IjEwMy41IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjI5OS4xIiB5PSIxMTAiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjM6IDIxLjg1NiBtczwvdGl0bGU+PHJlY3QgeD0iMzk5LjgiIHk9Ijk4IiB3aWR0aD0iNzEuNyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSI0MDIuOCIgeT0iMTEwIj5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCByb290OiAxODMuNjYwIG1zPC90aXRsZT48cmVjdCB4PSI0NzUuMSIgeT0iOTgiIHdpZHRoPSI2MDIuNCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iNDc4LjEiIHk9IjExMCI+cm9vdDwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCBibG9ja3MuMzogNTUuMzk4IG1zPC90aXRsZT48cmVjdCB4PSI0NzYuOCIgeT0iOTgiIHdpZHRoPSIxODEuNyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iNDc5LjgiIHk9IjExMCI+YmxvY2tzLjM8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YmFja3dhcmQgYmxvY2tzLjI6IDQ0LjM5NiBtczwvdGl0bGU+PHJlY3QgeD0iNjU4LjUiIHk9Ijk4IiB3aWR0aD0iMTQ1LjYiIGhlaWdodD0iMTYiIGNsYXNzPSJiYWNrd2FyZCIvPjx0ZXh0IHg9IjY2MS41IiB5PSIxMTAiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4xOiA0My4wNTUgbXM8L3RpdGxlPjxyZWN0IHg9IjgwNC4yIiB5PSI5OCIgd2lkdGg9IjE0MS4yIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI4MDcuMiIgeT0iMTEwIj5ibG9ja3MuMTwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCBibG9ja3MuMDogNDAuMTE3IG1zPC90aXRsZT48cmVjdCB4PSI5NDUuNSIgeT0iOTgiIHdpZHRoPSIxMzEuNiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iOTQ4LjUiIHk9IjExMCI+YmxvY2tzLjA8L3RleHQ+PC9nPgo8dGV4dCB4PSI0IiB5PSIxMzEiIGNsYXNzPSJuYW1lIj5jb21tdW5pY2F0aW9uPC90ZXh0Pgo8Zz48dGl0bGU+YWxsLWdhdGhlciByb290OiA4LjI3MCBtczwvdGl0bGU+PHJlY3QgeD0iMTMwLjEiIHk9IjExOCIgd2lkdGg9IjI3LjEiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMTMzLjEiIHk9IjEzMCI+cm9vdDwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4wOiAxLjIyNCBtczwvdGl0bGU+PHJlY3QgeD0iMTU3LjQiIHk9IjExOCIgd2lkdGg9IjQuMCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4xOiAyNi4xNDUgbXM8L3RpdGxlPjxyZWN0IHg9IjE2MS42IiB5PSIxMTgiIHdpZHRoPSI4NS44IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjE2NC42IiB5PSIxMzAiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjI6IDE1LjMwOSBtczwvdGl0bGU+PHJlY3QgeD0iMjQ3LjYiIHk9IjExOCIgd2lkdGg9IjUwLjIiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMzogMzEuMDM2IG1zPC90aXRsZT48cmVjdCB4PSIyOTguMCIgeT0iMTE4IiB3aWR0aD0iMTAxLjgiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMzAxLjAiIHk9IjEzMCI+YmxvY2tzLjM8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMzogMTguOTU1IG1zPC90aXRsZT48cmVjdCB4PSI0NzUuMSIgeT0iMTE4IiB3aWR0aD0iNjIuMiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI0NzguMSIgeT0iMTMwIj5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4yOiA1Ni4wNDAgbXM8L3RpdGxlPjxyZWN0IHg9IjQ3Ni44IiB5PSIxMzYiIHdpZHRoPSIxODMuOCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI0NzkuOCIgeT0iMTQ4Ij5ibG9ja3MuMjwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMzogNDQuNDA0IG1zPC90aXRsZT48cmVjdCB4PSI2NTguNSIgeT0iMTE4IiB3aWR0aD0iMTQ1LjciIGhlaWdodD0iMTYiIGNsYXNzPSJyZWR1Y2Utc2NhdHRlciIvPjx0ZXh0IHg9IjY2MS41IiB5PSIxMzAiPmJsb2Nrcy4zPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjE6IDQ0LjkwNiBtczwvdGl0bGU+PHJlY3QgeD0iNjU4LjYiIHk9IjE1NCIgd2lkdGg9IjE0Ny4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjY2MS42IiB5PSIxNjYiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIGJsb2Nrcy4yOiA0My4wNzYgbXM8L3RpdGxlPjxyZWN0IHg9IjgwNC4yIiB5PSIxMzYiIHdpZHRoPSIxNDEuMyIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iODA3LjIiIHk9IjE0OCI+YmxvY2tzLjI8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMDogNDQuMDE5IG1zPC90aXRsZT48cmVjdCB4PSI4MDQuMiIgeT0iMTE4IiB3aWR0aD0iMTQ0LjQiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iODA3LjIiIHk9IjEzMCI+YmxvY2tzLjA8L3RleHQ+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgYmxvY2tzLjE6IDQwLjEzNiBtczwvdGl0bGU+PHJlY3QgeD0iOTQ1LjQiIHk9IjE1NCIgd2lkdGg9IjEzMS43IiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48dGV4dCB4PSI5NDguNCIgeT0iMTY2Ij5ibG9ja3MuMTwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMDogNy41MzAgbXM8L3RpdGxlPjxyZWN0IHg9IjEwNzcuMSIgeT0iMTE4IiB3aWR0aD0iMjQuNyIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgcm9vdDogNy40OTAgbXM8L3RpdGxlPjxyZWN0IHg9IjEwNzcuNSIgeT0iMTM2IiB3aWR0aD0iMjQuNiIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PC9nPgo8dGV4dCB4PSI0IiB5PSIxOTkiIGNsYXNzPSJuYW1lIj5yYW5rIDI8L3RleHQ+CjxnPjx0aXRsZT5mb3J3YXJkIHJvb3Q6IDk3LjQ4MyBtczwvdGl0bGU+PHJlY3QgeD0iMTQ3LjIiIHk9IjE4NiIgd2lkdGg9IjMxOS44IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjE1MC4yIiB5PSIxOTgiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+Zm9yd2FyZCBibG9ja3MuMDogMjUuNjk3IG1zPC90aXRsZT48cmVjdCB4PSIxNDguMSIgeT0iMTg2IiB3aWR0aD0iODQuMyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIxNTEuMSIgeT0iMTk4Ij5ibG9ja3MuMDwvdGV4dD48L2c+CjxnPjx0aXRsZT5mb3J3YXJkIGJsb2Nrcy4xOiAyNS43MTMgbXM8L3RpdGxlPjxyZWN0IHg9IjIzMi43IiB5PSIxODYiIHdpZHRoPSI4NC4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjIzNS43IiB5PSIxOTgiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjI6IDI0LjM1NyBtczwvdGl0bGU+PHJlY3QgeD0iMzE3LjEiIHk9IjE4NiIgd2lkdGg9Ijc5LjkiIGhlaWdodD0iMTYiIGNsYXNzPSJmb3J3YXJkIi8+PHRleHQgeD0iMzIwLjEiIHk9IjE5OCI+YmxvY2tzLjI8L3RleHQ+PC9nPgo8Zz48dGl0bGU+Zm9yd2FyZCBibG9ja3MuMzogMjAuOTcwIG1zPC90aXRsZT48cmVjdCB4PSIzOTcuMiIgeT0iMTg2IiB3aWR0aD0iNjguOCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSI0MDAuMiIgeT0iMTk4Ij5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCByb290OiAxODEuNzMzIG1zPC90aXRsZT48cmVjdCB4PSI0NjkuNCIgeT0iMTg2IiB3aWR0aD0iNTk2LjEiIGhlaWdodD0iMTYiIGNsYXNzPSJiYWNrd2FyZCIvPjx0ZXh0IHg9IjQ3Mi40IiB5PSIxOTgiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YmFja3dhcmQgYmxvY2tzLjM6IDQ4Ljc0MCBtczwvdGl0bGU+PHJlY3QgeD0iNDg1LjQiIHk9IjE4NiIgd2lkdGg9IjE1OS45IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI0ODguNCIgeT0iMTk4Ij5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCBibG9ja3MuMjogMzcuNzI2IG1zPC90aXRsZT48cmVjdCB4PSI2NDUuMyIgeT0iMTg2IiB3aWR0aD0iMTIzLjciIGhlaWdodD0iMTYiIGNsYXNzPSJiYWNrd2FyZCIvPjx0ZXh0IHg9IjY0OC4zIiB5PSIxOTgiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4xOiA0Ni4xMjcgbXM8L3RpdGxlPjxyZWN0IHg9Ijc2OS4xIiB5PSIxODYiIHdpZHRoPSIxNTEuMyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iNzcyLjEiIHk9IjE5OCI+YmxvY2tzLjE8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YmFja3dhcmQgYmxvY2tzLjA6IDQ0LjEzOSBtczwvdGl0bGU+PHJlY3QgeD0iOTIwLjQiIHk9IjE4NiIgd2lkdGg9IjE0NC44IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI5MjMuNCIgeT0iMTk4Ij5ibG9ja3MuMDwvdGV4dD48L2c+Cjx0ZXh0IHg9IjQiIHk9IjIxOSIgY2xhc3M9Im5hbWUiPmNvbW11bmljYXRpb248L3RleHQ+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIHJvb3Q6IDAuMTEwIG1zPC90aXRsZT48cmVjdCB4PSIxNDcuMiIgeT0iMjA2IiB3aWR0aD0iMC41IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjA6IDEwLjgzMiBtczwvdGl0bGU+PHJlY3QgeD0iMTQ3LjciIHk9IjIwNiIgd2lkdGg9IjM1LjUiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMTogMTUuMDA3IG1zPC90aXRsZT48cmVjdCB4PSIxODMuNSIgeT0iMjA2IiB3aWR0aD0iNDkuMiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4yOiAyNS42OTMgbXM8L3RpdGxlPjxyZWN0IHg9IjIzMi45IiB5PSIyMDYiIHdpZHRoPSI4NC4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjIzNS45IiB5PSIyMTgiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjM6IDI0LjM0MyBtczwvdGl0bGU+PHJlY3QgeD0iMzE3LjMiIHk9IjIwNiIgd2lkdGg9Ijc5LjgiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMzIwLjMiIHk9IjIxOCI+YmxvY2tzLjM8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMzogMTYuNjgzIG1zPC90aXRsZT48cmVjdCB4PSI0NjkuNSIgeT0iMjA2IiB3aWR0aD0iNTQuNyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI0NzIuNSIgeT0iMjE4Ij5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4yOiA0OS4xOTIgbXM8L3RpdGxlPjxyZWN0IHg9IjQ4NS40IiB5PSIyMjQiIHdpZHRoPSIxNjEuNCIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI0ODguNCIgeT0iMjM2Ij5ibG9ja3MuMjwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMzogMzcuNzM4IG1zPC90aXRsZT48cmVjdCB4PSI2NDUuMiIgeT0iMjA2IiB3aWR0aD0iMTIzLjgiIGhlaWdodD0iMTYiIGNsYXNzPSJyZWR1Y2Utc2NhdHRlciIvPjx0ZXh0IHg9IjY0OC4yIiB5PSIyMTgiPmJsb2Nrcy4zPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjE6IDM4LjE5NyBtczwvdGl0bGU+PHJlY3QgeD0iNjQ1LjMiIHk9IjI0MiIgd2lkdGg9IjEyNS4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjY0OC4zIiB5PSIyNTQiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIGJsb2Nrcy4yOiA0Ni4xNTYgbXM8L3RpdGxlPjxyZWN0IHg9Ijc2OS4wIiB5PSIyMjQiIHdpZHRoPSIxNTEuNCIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iNzcyLjAiIHk9IjIzNiI+YmxvY2tzLjI8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMDogNDYuNjA1IG1zPC90aXRsZT48cmVjdCB4PSI3NjkuMSIgeT0iMjA2IiB3aWR0aD0iMTUyLjkiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iNzcyLjEiIHk9IjIxOCI+YmxvY2tzLjA8L3RleHQ+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgYmxvY2tzLjE6IDQ0LjE2NCBtczwvdGl0bGU+PHJlY3QgeD0iOTIwLjQiIHk9IjI0MiIgd2lkdGg9IjE0NC45IiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48dGV4dCB4PSI5MjMuNCIgeT0iMjU0Ij5ibG9ja3MuMTwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMDogMTYuNjcxIG1zPC90aXRsZT48cmVjdCB4PSIxMDY1LjIiIHk9IjIwNiIgd2lkdGg9IjU0LjciIGhlaWdodD0iMTYiIGNsYXNzPSJyZWR1Y2Utc2NhdHRlciIvPjx0ZXh0IHg9IjEwNjguMiIgeT0iMjE4Ij5ibG9ja3MuMDwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciByb290OiAxNi42NTMgbXM8L3RpdGxlPjxyZWN0IHg9IjEwNjUuNSIgeT0iMjI0IiB3aWR0aD0iNTQuNiIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iMTA2OC41IiB5PSIyMzYiPnJvb3Q8L3RleHQ+PC9nPgo8dGV4dCB4PSI0IiB5PSIyODciIGNsYXNzPSJuYW1lIj5yYW5rIDM8L3RleHQ+CjxnPjx0aXRsZT5mb3J3YXJkIHJvb3Q6IDk4Ljk0NyBtczwvdGl0bGU+PHJlY3QgeD0iMTQ2LjYiIHk9IjI3NCIgd2lkdGg9IjMyNC42IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjE0OS42IiB5PSIyODYiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+Zm9yd2FyZCBibG9ja3MuMDogMjcuNDk0IG1zPC90aXRsZT48cmVjdCB4PSIxNDguOCIgeT0iMjc0IiB3aWR0aD0iOTAuMiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIxNTEuOCIgeT0iMjg2Ij5ibG9ja3MuMDwvdGV4dD48L2c+CjxnPjx0aXRsZT5mb3J3YXJkIGJsb2Nrcy4xOiAyMS4yNTcgbXM8L3RpdGxlPjxyZWN0IHg9IjIzOS4xIiB5PSIyNzQiIHdpZHRoPSI2OS43IiBoZWlnaHQ9IjE2IiBjbGFzcz0iZm9yd2FyZCIvPjx0ZXh0IHg9IjI0Mi4xIiB5PSIyODYiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmZvcndhcmQgYmxvY2tzLjI6IDI0LjE1MSBtczwvdGl0bGU+PHJlY3QgeD0iMzA5LjAiIHk9IjI3NCIgd2lkdGg9Ijc5LjIiIGhlaWdodD0iMTYiIGNsYXNzPSJmb3J3YXJkIi8+PHRleHQgeD0iMzEyLjAiIHk9IjI4NiI+YmxvY2tzLjI8L3RleHQ+PC9nPgo8Zz48dGl0bGU+Zm9yd2FyZCBibG9ja3MuMzogMjQuODg5IG1zPC90aXRsZT48cmVjdCB4PSIzODguNCIgeT0iMjc0IiB3aWR0aD0iODEuNiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImZvcndhcmQiLz48dGV4dCB4PSIzOTEuNCIgeT0iMjg2Ij5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCByb290OiAxNzguNzAyIG1zPC90aXRsZT48cmVjdCB4PSI0NzMuNyIgeT0iMjc0IiB3aWR0aD0iNTg2LjIiIGhlaWdodD0iMTYiIGNsYXNzPSJiYWNrd2FyZCIvPjx0ZXh0IHg9IjQ3Ni43IiB5PSIyODYiPnJvb3Q8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YmFja3dhcmQgYmxvY2tzLjM6IDQ1Ljc5NCBtczwvdGl0bGU+PHJlY3QgeD0iNDc1LjQiIHk9IjI3NCIgd2lkdGg9IjE1MC4yIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI0NzguNCIgeT0iMjg2Ij5ibG9ja3MuMzwvdGV4dD48L2c+CjxnPjx0aXRsZT5iYWNrd2FyZCBibG9ja3MuMjogNDcuMDg2IG1zPC90aXRsZT48cmVjdCB4PSI2MjUuNiIgeT0iMjc0IiB3aWR0aD0iMTU0LjQiIGhlaWdodD0iMTYiIGNsYXNzPSJiYWNrd2FyZCIvPjx0ZXh0IHg9IjYyOC42IiB5PSIyODYiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmJhY2t3YXJkIGJsb2Nrcy4xOiA0Ni4yOTcgbXM8L3RpdGxlPjxyZWN0IHg9Ijc4MC4xIiB5PSIyNzQiIHdpZHRoPSIxNTEuOSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImJhY2t3YXJkIi8+PHRleHQgeD0iNzgzLjEiIHk9IjI4NiI+YmxvY2tzLjE8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YmFja3dhcmQgYmxvY2tzLjA6IDM4LjgzNyBtczwvdGl0bGU+PHJlY3QgeD0iOTMyLjAiIHk9IjI3NCIgd2lkdGg9IjEyNy40IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYmFja3dhcmQiLz48dGV4dCB4PSI5MzUuMCIgeT0iMjg2Ij5ibG9ja3MuMDwvdGV4dD48L2c+Cjx0ZXh0IHg9IjQiIHk9IjMwNyIgY2xhc3M9Im5hbWUiPmNvbW11bmljYXRpb248L3RleHQ+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIHJvb3Q6IDAuNTE1IG1zPC90aXRsZT48cmVjdCB4PSIxNDYuNyIgeT0iMjk0IiB3aWR0aD0iMS43IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjA6IDcuMDU0IG1zPC90aXRsZT48cmVjdCB4PSIxNDguNCIgeT0iMjk0IiB3aWR0aD0iMjMuMSIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4xOiAyMC41MjIgbXM8L3RpdGxlPjxyZWN0IHg9IjE3MS45IiB5PSIyOTQiIHdpZHRoPSI2Ny4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjE3NC45IiB5PSIzMDYiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjI6IDMwLjM1NiBtczwvdGl0bGU+PHJlY3QgeD0iMjM5LjQiIHk9IjI5NCIgd2lkdGg9Ijk5LjYiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iMjQyLjQiIHk9IjMwNiI+YmxvY2tzLjI8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMzogMTQuOTg4IG1zPC90aXRsZT48cmVjdCB4PSIzMzkuMyIgeT0iMjk0IiB3aWR0aD0iNDkuMiIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4zOiAxMi44ODQgbXM8L3RpdGxlPjxyZWN0IHg9IjQ3My43IiB5PSIyOTQiIHdpZHRoPSI0Mi4zIiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjwvZz4KPGc+PHRpdGxlPmFsbC1nYXRoZXIgYmxvY2tzLjI6IDQ2LjIyNiBtczwvdGl0bGU+PHJlY3QgeD0iNDc1LjQiIHk9IjMxMiIgd2lkdGg9IjE1MS42IiBoZWlnaHQ9IjE2IiBjbGFzcz0iYWxsLWdhdGhlciIvPjx0ZXh0IHg9IjQ3OC40IiB5PSIzMjQiPmJsb2Nrcy4yPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIGJsb2Nrcy4zOiA0Ny4wOTcgbXM8L3RpdGxlPjxyZWN0IHg9IjYyNS42IiB5PSIyOTQiIHdpZHRoPSIxNTQuNSIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iNjI4LjYiIHk9IjMwNiI+YmxvY2tzLjM8L3RleHQ+PC9nPgo8Zz48dGl0bGU+YWxsLWdhdGhlciBibG9ja3MuMTogNDcuNTM3IG1zPC90aXRsZT48cmVjdCB4PSI2MjUuNiIgeT0iMzMwIiB3aWR0aD0iMTU1LjkiIGhlaWdodD0iMTYiIGNsYXNzPSJhbGwtZ2F0aGVyIi8+PHRleHQgeD0iNjI4LjYiIHk9IjM0MiI+YmxvY2tzLjE8L3RleHQ+PC9nPgo8Zz48dGl0bGU+cmVkdWNlLXNjYXR0ZXIgYmxvY2tzLjI6IDQ2LjMxOSBtczwvdGl0bGU+PHJlY3QgeD0iNzgwLjEiIHk9IjMxMiIgd2lkdGg9IjE1MS45IiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48dGV4dCB4PSI3ODMuMSIgeT0iMzI0Ij5ibG9ja3MuMjwvdGV4dD48L2c+CjxnPjx0aXRsZT5hbGwtZ2F0aGVyIGJsb2Nrcy4wOiA0Ni43MzcgbXM8L3RpdGxlPjxyZWN0IHg9Ijc4MC4xIiB5PSIyOTQiIHdpZHRoPSIxNTMuMyIgaGVpZ2h0PSIxNiIgY2xhc3M9ImFsbC1nYXRoZXIiLz48dGV4dCB4PSI3ODMuMSIgeT0iMzA2Ij5ibG9ja3MuMDwvdGV4dD48L2c+CjxnPjx0aXRsZT5yZWR1Y2Utc2NhdHRlciBibG9ja3MuMTogMzguODU5IG1zPC90aXRsZT48cmVjdCB4PSI5MzIuMCIgeT0iMzMwIiB3aWR0aD0iMTI3LjUiIGhlaWdodD0iMTYiIGNsYXNzPSJyZWR1Y2Utc2NhdHRlciIvPjx0ZXh0IHg9IjkzNS4wIiB5PSIzNDIiPmJsb2Nrcy4xPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIGJsb2Nrcy4wOiAyMS40MTUgbXM8L3RpdGxlPjxyZWN0IHg9IjEwNTkuNCIgeT0iMjk0IiB3aWR0aD0iNzAuMiIgaGVpZ2h0PSIxNiIgY2xhc3M9InJlZHVjZS1zY2F0dGVyIi8+PHRleHQgeD0iMTA2Mi40IiB5PSIzMDYiPmJsb2Nrcy4wPC90ZXh0PjwvZz4KPGc+PHRpdGxlPnJlZHVjZS1zY2F0dGVyIHJvb3Q6IDIxLjM5MCBtczwvdGl0bGU+PHJlY3QgeD0iMTA1OS44IiB5PSIzMTIiIHdpZHRoPSI3MC4yIiBoZWlnaHQ9IjE2IiBjbGFzcz0icmVkdWNlLXNjYXR0ZXIiLz48dGV4dCB4PSIxMDYyLjgiIHk9IjMyNCI+cm9vdDwvdGV4dD48L2c+Cjx0ZXh0IHg9IjEzMCIgeT0iMzc0Ij4zMDQuOSBtcy4gQmx1ZTogZm9yd2FyZCwgYW5kIGRhcmtlciBiYWNrd2FyZDsgb3JhbmdlOiBhbGwtZ2F0aGVyczsgZ3JlZW46IHJlZHVjZS1zY2F0dGVyczsgdmlvbGV0OiBhbGwtcmVkdWNlcy48L3RleHQ+Cjwvc3ZnPgo="]
#[doc = ""]
#[doc = include_str!("../docs/troubleshooting.md")]
pub mod troubleshooting {}

#[doc = ""]
#[doc = include_str!("../docs/guides/operators.md")]
pub mod operators {}

#[doc = "[gpus.md#several-gpus-with-nccl]: crate::book::gpus#several-gpus-with-nccl"]
#[doc = ""]
#[doc = include_str!("../docs/guides/backend.md")]
pub mod backend {}

#[doc = "[backend.md]: crate::book::backend"]
#[doc = ""]
#[doc = include_str!("../docs/guides/testing.md")]
pub mod testing {}

#[doc = "[guides/optimizers.md#fused-steps]: crate::book::optimizers#fused-steps"]
#[doc = ""]
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

#[doc = "[guides/checkpoints.md#guarantees]: crate::book::checkpoints#guarantees"]
#[doc = "[guides/clusters.md#surviving-the-loss-of-a-process]: crate::book::clusters#surviving-the-loss-of-a-process"]
#[doc = "[guides/tensor-parallelism.md]: crate::book::tensor_parallelism"]
#[doc = "[guides/wrong-loss.md]: crate::book::wrong_loss"]
#[doc = "[limits.md#models]: crate::book::limits#models"]
#[doc = "[limits.md#what-you-will-meet]: crate::book::limits#what-you-will-meet"]
#[doc = "[limits.md#units-and-gradients]: crate::book::limits#units-and-gradients"]
#[doc = "[limits.md#values]: crate::book::limits#values"]
#[doc = ""]
#[doc = include_str!("../docs/guarantees.md")]
pub mod guarantees {}

#[doc = "[guarantees.md#1-no-hang-after-a-failure]: crate::book::guarantees#1-no-hang-after-a-failure"]
#[doc = "[guides/checkpoints.md]: crate::book::checkpoints"]
#[doc = "[guides/clusters.md#surviving-the-loss-of-a-process]: crate::book::clusters#surviving-the-loss-of-a-process"]
#[doc = "[guides/evaluation.md]: crate::book::evaluation"]
#[doc = "[guides/gpus.md]: crate::book::gpus"]
#[doc = ""]
#[doc = include_str!("../docs/limits.md")]
pub mod limits {}

#[doc = "[guides/operators.md]: crate::book::operators"]
#[doc = "[performance.md#host-time-of-a-unit]: crate::book::performance#host-time-of-a-unit"]
#[doc = ""]
#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}

#[doc = "[from-pytorch.md]: crate::book::from_pytorch"]
#[doc = "[guides/gpus.md]: crate::book::gpus"]
#[doc = ""]
#[doc = include_str!("../docs/parity.md")]
pub mod parity {}
