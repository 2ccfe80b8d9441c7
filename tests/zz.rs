mod comm {
    #[path = "/work/main/tests/suite/comm/collectives.rs"]
    mod collectives;
    #[path = "/work/main/tests/suite/comm/groups.rs"]
    mod groups;
    use burn::backend::DispatchTensor;
    use burn::tensor::{Tensor, TensorData};
    use burn_dtensor::Error;
    use burn_dtensor::comm::{Launch, World, launch};
    use std::time::Duration;
    fn run(ranks: usize, program: impl Fn(&World) -> Result<(), Error> + Sync) {
        launch(Launch::threads(ranks).deadline(Duration::from_secs(60)), program)
            .unwrap_or_else(|error| panic!("{error}"));
    }
    fn into_data(tensor: DispatchTensor) -> TensorData {
        Tensor::<1>::from_dispatch(tensor).into_data()
    }
}
