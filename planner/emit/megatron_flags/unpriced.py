"""Options that are of no part in a price, by why they are not.

Names and values: see `planner.emit.megatron_flags`.
"""

from __future__ import annotations

UNPRICED: dict[str, dict[str, str]] = {
    "how messages are sent: within the interval of a price": {
        "str": (
            "pipeline-model-parallel-comm-backend tp-comm-bootstrap-backend "
            "tp-comm-overlap-cfg nccl-communicator-config-path sharp-enabled-group"
        ),
        "": (
            "no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad "
            "disable-tp-comm-bulk-dgrad no-tp-comm-overlap-ag disable-tp-comm-overlap-ag "
            "no-tp-comm-overlap-rs disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad "
            "no-tp-comm-split-ag disable-tp-comm-split-ag no-tp-comm-split-rs "
            "disable-tp-comm-split-rs use-ring-exchange-p2p "
            "overlap-p2p-communication-warmup-flush high-priority-a2a-comm-stream "
            "moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs "
            "moe-ncclep-zero-copy no-align-grad-reduce disable-align-grad-reduce use-sharp "
            "ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation "
            "ddp-average-in-collective overlap-param-gather-with-optimizer-step "
            "no-align-param-gather no-use-layer-wise-param-layout use-nccl-ub "
            "disable-symmetric-registration fsdp-manual-registration "
            "create-all-gather-group no-gradient-reduce-div-fusion fsdp-double-buffer "
            "torch-fsdp2-no-reshard-after-forward "
            "megatron-fsdp-enable-fine-grained-param-gather"
        ),
        "int": (
            "moe-flex-dispatcher-num-sms moe-deepep-num-sms moe-hybridep-num-sms "
            "moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute "
            "moe-hybridep-num-sms-preprocessing ddp-num-buckets ddp-bucket-size "
            "megatron-fsdp-version suggested-communication-unit-size"
        ),
        "str+": ("high-priority-stream-groups ddp-param-name-patterns-for-fp32-local-accumulation"),
    },
    "a part of an option that is refused or says it itself": {
        "int": (
            "max-seqlen-per-dp-cp-rank wgrad-deferral-limit dsa-indexer-n-heads "
            "dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-topk-freq "
            "dsa-indexer-skip-topk-offset linear-conv-kernel-dim linear-key-head-dim "
            "linear-value-head-dim linear-num-key-heads linear-num-value-heads "
            "num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 mhc-num-residual-streams "
            "mhc-sinkhorn-iterations mhc-recompute-layer-num mamba-state-dim mamba-head-dim "
            "mamba-num-groups mamba-num-heads gdp-num-householder "
            "gdp-num-chunk-states-to-recompute min-offloaded-tensor-size "
            "delta-offload-bytes-across-pp-ranks moe-paged-stash-page-size "
            "fine-grained-offloading-max-inflight-offloads muon-num-ns-steps "
            "logits-save-top-k logits-save-top-p-min-k logits-load-decode-threads "
            "logits-load-prefetch-factor logits-load-msc-prefetch-depth"
        ),
        "": (
            "mtp-standalone cpu-offloading-retain-pinned-cpu-buffers "
            "dsa-indexer-use-sparse-loss dsa-indexer-rope-interleaved "
            "no-dsa-indexer-rotate-activation disable-dsa-indexer-rotate-activation "
            "no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu "
            "dsa-indexer-k-norm-fp32 disable-mamba-mem-eff-path gdp-cutedsl-kernel "
            "delay-offload-until-cuda-graph muon-no-split-qkv muon-nesterov muon-use-syrk "
            "use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d "
            "no-pin-cpu-grads no-pin-cpu-params reuse-grad-buf-for-mxfp8-param-ag "
            "gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub "
            "gtp-expert-remat-nccl-ub keep-fp8-transpose-cache logits-load-ignore-errors "
            "megatron-fsdp-max-pool-double-buffer fsdp-db-use-persist-buf-on-alloc-fail"
        ),
        "str": (
            "mtp-hybrid-override-pattern dsa-kernel-backend window-attn-skip-freq "
            "muon-scale-mode muon-fp32-matmul-prec muon-coefficient-type muon-tp-mode "
            "muon-scalar-optimizer mamba-training-ssm-states-dtype logits-save-dtype"
        ),
        "float": (
            "dsa-indexer-loss-coeff dsa-indexer-k-norm-epsilon mhc-init-gating-factor "
            "activation-offload-fraction moe-paged-stash-buffer-size-factor-cuda "
            "moe-paged-stash-buffer-size-factor-cpu sgd-momentum muon-momentum "
            "muon-extra-scale-factor lion-beta1 lion-beta2 optimizer-offload-fraction "
            "logits-save-top-p logits-load-kd-loss-alpha"
        ),
        "str+": "gtp-remat-opt-in-modules offload-modules",
    },
    "how weights start": {
        "": (
            "no-initialization use-cpu-initialization init-model-with-meta-device use-mup "
            "te-rng-tracker inference-rng-tracker data-parallel-random-init "
            "init-method-xavier-uniform"
        ),
        "float": (
            "init-method-std embedding-init-method-std mup-width-mult mup-embedding-mult "
            "mup-output-mult mup-base-head-dim mup-attn-scale-power"
        ),
        "int": "mup-base-hidden-size seed",
    },
    "which small kernels are one: within the interval of a price": {
        "": (
            "ep-overlap-early-attn-memory-release "
            "disable-bf16-reduced-precision-matmul use-fused-weighted-squared-relu "
            "fused-residual-rmsnorm use-transformer-engine-op-fuser use-kitchen-attention "
            "moe-permute-fusion moe-router-fusion "
            "no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding "
            "batch-invariant-mode use-te-activation-func "
            "no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
            "no-rope-fusion no-persist-layer-norm no-gradient-accumulation-fusion "
            "disable-jit-fuser mla-down-proj-fusion"
        ),
        "str": (
            "fp8-quantizer-factory kitchen-attention-backend "
            "fp4-quantizer-factory batch-invariant-backend"
        ),
        "int": "flash-attention-version",
    },
    "numbers of the optimizer and its schedule": {
        "float": (
            "mtp-loss-scaling-factor weight-decay clip-grad adam-beta1 adam-beta2 adam-eps "
            "lr-warmup-fraction lr-warmup-init start-weight-decay end-weight-decay lr "
            "min-lr decoupled-lr decoupled-min-lr loss-scale initial-loss-scale "
            "min-loss-scale loss-scale-window"
        ),
        "": (
            "mtp-detach-heads apply-wd-to-qk-layernorm override-opt_param-scheduler "
            "override-opt-param-scheduler use-checkpoint-opt_param-scheduler "
            "use-checkpoint-opt-param-scheduler"
        ),
        "int": (
            "fp8-margin fp8-interval fp8-amax-history-len train-iters train-samples "
            "exit-interval exit-duration-in-mins lr-decay-iters lr-decay-samples "
            "lr-wsd-decay-iters lr-wsd-decay-samples lr-warmup-iters lr-warmup-samples "
            "hysteresis"
        ),
        "str": (
            "fp8-amax-compute-algo no-weight-decay-cond-type lr-decay-style "
            "lr-wsd-decay-style weight-decay-incr-style"
        ),
        "int+": "iterations-to-skip",
    },
    "numbers of a layer, and not its sizes": {
        "": (
            "mtp-hsm apply-residual-connection-post-layernorm apply-layernorm-1p "
            "add-qkv-bias qk-clip calculate-per-token-loss moe-shared-expert-gate "
            "openai-gelu squared-relu"
        ),
        "str": "softmax-type onnx-safe",
        "float": (
            "norm-epsilon glu-linear-offset activation-func-clamp-value qk-clip-alpha "
            "qk-clip-threshold"
        ),
    },
    "how positions turn heads": {
        "": (
            "rotary-interleaved yarn-correction-range-round-to-int "
            "no-yarn-correction-range-round-to-int use-rope-scaling cache-mla-latents"
        ),
        "int+": "mrope-section",
        "int": (
            "yarn-original-max-position-embeddings relative-attention-num-buckets "
            "relative-attention-max-distance rotary-base "
            "rotary-seq-len-interpolation-factor"
        ),
        "float": (
            "yarn-beta-fast yarn-beta-slow rotary-percent rope-scaling-factor "
            "rotary-scaling-factor mscale mscale-all-dim"
        ),
        "str": "no-rope-freq rope-type",
    },
    "how weights lie together": {
        "": (
            "use-grouped-gemm-for-shared-expert moe-router-padding-for-quantization "
            "moe-router-padding-for-fp8 use-grouped-gemm-for-dense-mlp "
            "moe-use-grouped-tensor moe-single-grouped-weight moe-single-grouped-bias"
        ),
        "int": "moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size",
    },
    "how a router scores: a small part of a layer": {
        "": (
            "moe-enable-routing-replay moe-router-pre-softmax moe-router-enable-expert-bias "
            "moe-apply-probs-on-input moe-use-upcycling moe-routing-trace-capture-logits "
            "moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights"
        ),
        "int": (
            "moe-router-num-groups moe-router-group-topk moe-upcycling-granularity "
            "moe-routing-trace-max-training-iters"
        ),
        "float": (
            "moe-router-topk-scaling-factor moe-router-bias-update-rate "
            "moe-router-quantile-balancing-ema moe-z-loss-coeff moe-input-jitter-eps"
        ),
        "str": "moe-router-score-function moe-router-dtype moe-token-drop-policy",
        "str+": "moe-router-load-balancing-type",
        "float+": "moe-aux-loss-coeff",
    },
    "logs and measurements": {
        "": (
            "moe-per-layer-logging profile use-pytorch-profiler "
            "pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack "
            "pytorch-profiler-collect-chakra record-memory-history record-shapes "
            "nvtx-ranges manual-gc no-manual-gc-eval disable-manual-gc-eval "
            "no-check-for-nan-in-loss-and-grad check-for-large-grads log-params-norm "
            "log-throughput log-progress log-timers-to-tensorboard "
            "no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard "
            "log-validation-ppl-to-tensorboard log-memory-to-tensorboard "
            "log-device-memory-used log-num-zeros-in-grad log-max-attention-logit "
            "no-barrier-with-level-1-timing log-world-size-to-tensorboard log-energy "
            "otel-enabled log-straggler disable-straggler-on-startup "
            "run-workload-inspector-server no-one-logger one-logger-async"
        ),
        "str": (
            "config-logger-dir memory-snapshot-path dump-param-to-param-group-map "
            "timing-log-option tensorboard-dir wandb-project wandb-exp-name wandb-save-dir "
            "wandb-entity moe-routing-trace-path otel-service-name otel-span-groups "
            "one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version"
        ),
        "int": (
            "profile-step-start profile-step-end empty-unused-memory-level "
            "check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval "
            "train-sync-interval manual-gc-interval log-interval timing-log-level "
            "tensorboard-log-interval tensorboard-queue-size log-memory-interval "
            "logging-level straggler-ctrlr-port straggler-minmax-count"
        ),
        "int+": "profile-ranks",
    },
    "inference": {
        "": (
            "moe-pad-experts-for-cuda-graph-inference flash-decode "
            "nccl-all-reduce-for-prefill inference-fuse-tp-communication "
            "inference-disable-triton-nvls-kernels "
            "inference-moe-disable-fused-quant-kernels output-bert-embeddings "
            "use-legacy-static-engine inference-dynamic-batching "
            "inference-dynamic-batching-track-paused-request-events "
            "inference-dynamic-batching-track-generated-token-events "
            "decode-only-cuda-graphs inference-cuda-graph-all-prefills "
            "enable-chunked-prefill inference-dynamic-batching-prefix-caching "
            "no-inference-dynamic-batching-prefix-caching "
            "use-same-sampling-seed-across-dp-ranks inference-text-gen-server-logging "
            "no-inference-text-gen-server-logging inference-wandb-logging "
            "no-inference-wandb-logging inference-use-synchronous-zmq-collectives "
            "no-inference-use-synchronous-zmq-collectives inference-disable-ep-consensus "
            "no-inference-disable-ep-consensus"
        ),
        "str": (
            "inference-cuda-graph-scope symmetric-ar-type inference-grouped-gemm-backend "
            "inference-moe-token-dispatcher-type bert-embedder-type "
            "inference-dynamic-batching-prefix-caching-eviction-policy "
            "inference-dynamic-batching-prefix-caching-coordinator-policy "
            "inference-dynamic-batching-cuda-graph-sizing-distribution "
            "inference-dynamic-batching-sampling-backend "
            "inference-dynamic-batching-async-sched-mode "
            "inference-dynamic-batching-logprobs-mode mamba-inference-conv-states-dtype "
            "mamba-inference-ssm-states-dtype inference-shards"
        ),
        "int": (
            "mlp-chunks-for-prefill inference-batch-times-seqlen-threshold "
            "max-tokens-to-oom inference-max-requests inference-max-seq-length "
            "inference-dynamic-batching-block-size inference-dynamic-batching-max-requests "
            "inference-dynamic-batching-max-tokens "
            "inference-dynamic-batching-num-cuda-graphs inference-cuda-graph-max-tokens "
            "inference-dynamic-batching-unified-memory-level num-speculative-tokens "
            "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
            "inference-logging-step-interval inference-coordinator-port"
        ),
        "float": (
            "inference-dynamic-batching-buffer-size-gb "
            "inference-dynamic-batching-paused-buffer-size-gb "
            "inference-dynamic-batching-mamba-memory-ratio "
            "inference-dynamic-batching-prefix-caching-routing-alpha "
            "inference-dynamic-batching-prefix-caching-mamba-gb"
        ),
    },
    "how graphs of kernels are made": {
        "int": "cuda-graph-warmup-steps",
        "": "optimizer-cuda-graph",
    },
    "without effect in Megatron-LM": {
        "": ("no-position-embedding use-mcore-models use-dist-ckpt ckpt-fully-parallel-save"),
        "str": "dist-ckpt-format",
        "int": "dist-ckpt-workers",
    },
    "how the batch grows to --global-batch-size, which is priced": {
        "int3": "rampup-batch-size",
        "": "decrease-batch-size-if-needed",
    },
    "failures and restarts": {
        "": (
            "exit-signal-handler exit-signal-handler-for-dataloader "
            "exit-signal-handler-for-training adlr-autoresume inprocess-restart "
            "inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts "
            "check-for-spiky-loss"
        ),
        "str": (
            "exit-signal result-rejected-tracker-filename inprocess-granularity "
            "error-injection-type rerun-mode fault-injector-ranks "
            "fault-injector-fault-types fault-injector-fault-probabilities"
        ),
        "int": (
            "adlr-autoresume-interval inprocess-max-iterations inprocess-active-world-size "
            "ft-num-warmup-iters error-injection-rate fault-injector-num-ranks "
            "fault-injector-delay-start-iteration fault-injector-seed"
        ),
        "float": (
            "inprocess-monitor-thread-interval inprocess-monitor-process-interval "
            "inprocess-progress-watchdog-interval inprocess-heartbeat-interval "
            "inprocess-soft-timeout inprocess-hard-timeout inprocess-heartbeat-timeout "
            "inprocess-barrier-timeout inprocess-completion-timeout "
            "inprocess-last-call-wait inprocess-termination-grace-time "
            "fault-injector-fault-delay fault-injector-mtti-seconds "
            "fault-injector-offset-seconds"
        ),
    },
    "samples: they are read beside steps": {
        "str": (
            "dataloader-type phase-transition-iterations split data-args-path "
            "per-split-data-args-path per-dataset-sequences-path data-cache-path "
            "object-storage-cache-path fim-split-sample fim-no-prefix fim-prefix-token "
            "fim-middle-token fim-suffix-token fim-pad-token fim-eod-token "
            "sft-tokenizer-prompt-format"
        ),
        "str*": "data-path train-data-path valid-data-path test-data-path",
        "": (
            "dataloader-fast-cache-load dataloader-defer-npy-index-mmap no-mmap-bin-files "
            "mock-data reset-position-ids reset-attention-mask "
            "dataloader-inter-document-masking eod-mask-loss "
            "allow-ambiguous-pad-tokens fim-data "
            "enable-msc disable-msc sft"
        ),
        "float": (
            "sample-rate mask-prob short-seq-prob mid-level-dataset-surplus fim-rate "
            "fim-spm-rate fim-fragment-rate"
        ),
        "int": "num-workers num-dataset-builder-threads",
    },
    "reinforcement learning, which --perform-rl-step switches on (refused)": {
        "int": (
            "rl-prompts-per-eval grpo-prompts-per-step grpo-group-size "
            "rl-max-inflight-requests rl-rollout-bank-max-bytes grpo-iterations "
            "rl-default-top-k rl-sequence-packing-max-sequences-per-bin "
            "rl-inference-tensor-model-parallel-size "
            "rl-inference-pipeline-model-parallel-size "
            "rl-inference-expert-model-parallel-size "
            "rl-inference-expert-tensor-model-parallel-size "
            "rl-inference-model-unified-memory-level"
        ),
        "float": (
            "rl-generation-lag grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta "
            "grpo-entropy-term-weight rl-default-temperature rl-default-top-p "
            "rl-importance-sampling-truncation-coef"
        ),
        "str": (
            "rl-submission-granularity rl-consumption-granularity rl-rollout-bank-dir "
            "langrl-env-config rl-kv-cache-management-mode rl-sequence-packing-algo "
            "refit-method rl-profile-dir"
        ),
        "": (
            "rl-durable-rollout-bank grpo-filter-groups-with-same-reward "
            "rl-offload-optimizer-during-inference rl-persist-cuda-graphs "
            "no-rl-persist-cuda-graphs rl-partial-rollouts no-rl-partial-rollouts "
            "rl-inference-logprobs-is-correction no-rl-inference-logprobs-is-correction "
            "rl-use-sequence-packing no-rl-use-sequence-packing rl-training-cuda-graphs "
            "no-rl-training-cuda-graphs rl-offload-inference-model-weights-when-idle "
            "no-rl-offload-inference-model-weights-when-idle rl-verify-model-weights-swap "
            "no-rl-verify-model-weights-swap rl-skip-bos-token no-rl-skip-bos-token "
            "rl-profile"
        ),
        "str*": "rl-inference-parsers",
    },
    "checkpoints: they are written between steps": {
        "str": (
            "save load non-persistent-ckpt-type non-persistent-global-ckpt-dir "
            "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo "
            "pretrained-checkpoint ckpt-convert-format ckpt-convert-save async-strategy "
            "ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group "
            "ckpt-fully-parallel-load-process-group ckpt-pg-tensors-cache-path "
            "dist-ckpt-strictness"
        ),
        "int": (
            "save-interval persistent-save-interval save-params-interval "
            "save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
            "save-dgrads-interval save-retain-interval non-persistent-save-interval "
            "ckpt-step async-ckpt-cpu-priority async-ckpt-io-priority replication-jump "
            "replication-factor override-ckpt-iteration"
        ),
        "": (
            "load-main-params-from-ckpt finetune "
            "no-use-tokenizer-model-from-checkpoint-args "
            "disable-use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint "
            "auto-detect-ckpt-format ckpt-convert-update-legacy-dist-opt-format "
            "no-ckpt-fully-parallel-save async-save use-persistent-ckpt-worker "
            "async-ckpt-use-cpu-shm ckpt-fully-parallel-load "
            "ckpt-fully-parallel-load-per-rank-objects ckpt-assume-constant-structure "
            "ckpt-pg-tensors-cache-create no-ckpt-load-validate-sharding-integrity "
            "disable-ckpt-load-validate-sharding-integrity no-strict-fsdp-dtensor-load "
            "disable-strict-fsdp-dtensor-load dist-ckpt-save-pre-mcore-014 "
            "dist-ckpt-optim-fully-reshardable "
            "distrib-optim-fully-reshardable-mem-efficient no-save-tokenizer-assets "
            "disable-save-tokenizer-assets replication verify-integrity no-save-optim "
            "no-save-rng no-load-optim no-load-rng ckpt-drop-redundant-extra-state"
        ),
    },
    "processes and their groups": {
        "str": "distributed-backend flight-recorder-dump-path",
        "int": (
            "distributed-timeout-minutes local-rank distributed-timeout-seconds-after-init "
            "flight-recorder-trace-buffer-size"
        ),
        "": (
            "lazy-mpu-init disable-gloo-process-groups no-flight-recorder-dump-on-timeout "
            "disable-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace "
            "no-flight-recorder-include-only-active "
            "disable-flight-recorder-include-only-active "
            "no-flight-recorder-extra-dump-on-exec "
            "disable-flight-recorder-extra-dump-on-exec fake-process-group "
            "enable-experimental"
        ),
    },
    "evaluation between steps": {
        "int": (
            "eval-iters eval-interval start-eval-at-iter eval-global-batch-size "
            "eval-micro-batch-size"
        ),
        "": "test-mode full-validation multiple-validation-sets",
        "str+": "validation-set-names",
    },
    "what tokens are; the vocabulary is --vocab-size or its tokenizer": {
        "str": "vocab-file merge-file tokenizer-metadata tiktoken-pattern chat-template",
        "str+": "tokenizer-special-tokens",
        "int": "tiktoken-num-special-tokens null-tokenizer-eod-id null-tokenizer-pad-id",
        "": (
            "tokenizer-sentencepiece-legacy "
            "no-tokenizer-sentencepiece-ignore-extra-whitespaces "
            "disable-tokenizer-sentencepiece-ignore-extra-whitespaces "
            "tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens "
            "trust-remote-code use-gigatoken"
        ),
    },
    "scripts of images and retrieval": {
        "int": (
            "ict-head-size biencoder-projection-dim indexer-batch-size indexer-log-interval "
            "num-classes num-channels iter-per-epoch dino-local-img-size "
            "dino-local-crops-number dino-head-hidden-size dino-bottleneck-size "
            "dino-warmup-teacher-temp-epochs"
        ),
        "": (
            "biencoder-shared-query-context-model use-one-sent-docs retriever-score-scaling "
            "no-data-sharding dino-norm-last-layer"
        ),
        "str": (
            "ict-load bert-load titles-data-path evidence-data-path block-data-path "
            "embedding-path vision-pretraining-type vision-backbone-type swin-backbone-type "
            "mask-type"
        ),
        "float": (
            "query-in-block-prob classes-fraction data-per-class-fraction head-lr-mult "
            "mask-factor dino-freeze-last-layer dino-warmup-teacher-temp dino-teacher-temp"
        ),
        "int+": "retriever-report-topk-accuracies",
    },
    "options of other scripts of Megatron-LM's repository": {
        "": "export-te-mcore-model",
        "str": "export-kd-cfg dataset-provider",
        "int": "total-seq-length packing-buffer-size",
    },
}
"""Names of options by what their values are, by why they are of no part."""
