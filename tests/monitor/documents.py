"""Documents of neuron-ls and neuron-monitor: captures from real machines, and a strict check of their form.

A shape is a type, a tuple of shapes, a list of one shape, `{"*": shape}` for a table with any keys, or a table of
shapes; a key that ends with `?` may be absent.
"""

from typing import Any, Final

NUMBER: Final = (int, float)
NONE: Final = type(None)

LS: Final = [
    {
        "instance_type?": str,
        "instance_id?": str,
        "neuron_device": int,
        "bdf": str,
        "cpu_affinity?": str,
        "numa_node?": str,
        "connected_to": ([int], NONE),
        "nc_count": int,
        "logical_neuroncore_config?": int,
        "memory_size": int,
        "neuroncore_ids": [int],
        "neuron_processes": [{"pid": int, "command": str, "neuron_runtime_version": str}],
    }
]

TRN2_3XLARGE: Final = [
    {
        "instance_type": "trn2.3xlarge",
        "instance_id": "i-0123456789abcdef0",
        "neuron_device": 0,
        "bdf": "0000:33:00.0",
        "cpu_affinity": "0-11",
        "numa_node": "0",
        "connected_to": None,
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 103079215104,
        "neuroncore_ids": [0, 1, 2, 3],
        "neuron_processes": [],
    }
]
TRN2_48XLARGE_CONTAINER: Final = [
    {
        **TRN2_3XLARGE[0],
        "instance_type": "trn2.48xlarge",
        "connected_to": [12, 1, 9, 14],
        "neuron_processes": [{"pid": 1966680, "command": "", "neuron_runtime_version": "2.34.10"}],
    }
]
TRN1_2XLARGE: Final = [
    {
        "neuron_device": 0,
        "bdf": "0000:00:1e.0",
        "cpu_affinity": "0-7",
        "numa_node": "-1",
        "connected_to": None,
        "nc_count": 2,
        "memory_size": 34359738368,
        "neuroncore_ids": [0, 1],
        "neuron_processes": [],
    }
]

_GROUP: Final = {"period?": NUMBER, "error?": str}
_PERCENTILES: Final = ({f"p{rank}?": NUMBER for rank in (0, 1, 25, 50, 75, 99, 100)}, NONE)
_HOST: Final = {"application_memory": int, "constants": int, "dma_buffers": int, "tensors": int}
_CORE: Final = {
    "constants": int,
    "model_code": int,
    "model_shared_scratchpad": int,
    "runtime_memory": int,
    "tensors": int,
}
_VCPU: Final = dict.fromkeys(("user", "nice", "system", "idle", "io_wait", "irq", "soft_irq"), NUMBER)
_MODEL: Final = {
    "name": str,
    "uuid": str,
    "model_id": int,
    "is_running": bool,
    "subgraphs": {
        "*": {
            "memory_used_bytes": {
                "host": int,
                "neuron_device": int,
                "usage_breakdown": {
                    "host": _HOST,
                    "neuron_device": {"constants": int, "model_code": int, "runtime_memory": int, "tensors": int},
                },
            },
            "neuroncore_index": int,
            "neuron_device_index": int,
        }
    },
}
_REPORT: Final = {
    "neuroncore_counters?": {
        **_GROUP,
        "neuroncores_in_use": {
            "*": {
                "neuroncore_utilization": NUMBER,
                "effective_flops?": int,
                "flops?": int,
                "v3d?": {"*": {"neuroncore_utilization": NUMBER}},
            }
        },
    },
    "execution_stats?": {
        **_GROUP,
        "error_summary": {
            "generic?": int,
            "numerical": int,
            "transient": int,
            "model": int,
            "runtime": int,
            "hardware": int,
        },
        "execution_summary": {
            "completed": int,
            "completed_with_err": int,
            "completed_with_num_err": int,
            "timed_out": int,
            "incorrect_input": int,
            "failed_to_queue": int,
        },
        "latency_stats": {"total_latency?": _PERCENTILES, "device_latency?": _PERCENTILES},
    },
    "memory_used?": {
        **_GROUP,
        "neuron_runtime_used_bytes": {
            "host": int,
            "neuron_device": int,
            "usage_breakdown?": {"host": _HOST, "neuroncore_memory_usage": {"*": _CORE}},
        },
        "loaded_models?": [_MODEL],
    },
    "neuron_runtime_vcpu_usage?": {**_GROUP, "vcpu_usage": {"user": NUMBER, "system": NUMBER}},
}
_INSTANCE: Final = dict.fromkeys(
    (
        *("instance_name", "instance_id", "instance_type", "instance_availability_zone"),
        *("instance_availability_zone_id", "instance_region", "ami_id", "subnet_id"),
    ),
    str,
)
MONITOR: Final = {
    "neuron_runtime_data": (
        [{"pid": int, "address?": str, "neuron_runtime_tag?": str, "error?": str, "report": _REPORT}],
        NONE,
    ),
    "system_data": {
        "neuron_hw_counters?": {
            **_GROUP,
            "neuron_devices": [
                {
                    "neuron_device_index": int,
                    "mem_ecc_corrected": int,
                    "mem_ecc_uncorrected": int,
                    "sram_ecc_corrected": int,
                    "sram_ecc_uncorrected": int,
                }
            ],
        },
        "vcpu_usage?": {**_GROUP, "average_usage": _VCPU, "usage_data": {"*": _VCPU}, "context_switch_count": int},
        "memory_info?": {
            **_GROUP,
            "memory_total_bytes": int,
            "memory_used_bytes": int,
            "swap_total_bytes": int,
            "swap_used_bytes": int,
        },
    },
    "instance_info": {**_INSTANCE, "error?": str},
    "neuron_hardware_info": {
        "neuron_device_type": str,
        "neuron_device_version": str,
        "neuroncore_version": str,
        "neuron_device_count": int,
        "neuron_device_memory_size": int,
        "neuroncore_per_device_count": int,
        "logical_neuroncore_config": int,
        "error?": str,
    },
}

INF2_XLARGE: Final[dict[str, Any]] = {
    "instance_info": {
        "ami_id": "ami-0123456789abcdef0",
        "instance_availability_zone": "us-east-1d",
        "instance_availability_zone_id": "use1-az6",
        "instance_id": "i-0123456789abcdef0",
        "instance_name": "",
        "instance_region": "us-east-1",
        "instance_type": "inf2.xlarge",
        "subnet_id": "subnet-0123456789abcdef0",
    },
    "neuron_hardware_info": {
        "logical_neuroncore_config": 1,
        "neuron_device_count": 1,
        "neuron_device_memory_size": 34359738368,
        "neuron_device_type": "inferentia2",
        "neuron_device_version": "v3",
        "neuroncore_per_device_count": 2,
        "neuroncore_version": "v2",
    },
    "neuron_runtime_data": [
        {
            "pid": 2199,
            "report": {
                "neuroncore_counters": {
                    "neuroncores_in_use": {
                        "0": {"effective_flops": 875590474948, "neuroncore_utilization": 89.4},
                        "1": {"effective_flops": 0, "neuroncore_utilization": 0},
                    },
                    "period": 1.000665759,
                },
                "memory_used": {"neuron_runtime_used_bytes": {"host": 1166249984, "neuron_device": 141649980}},
                "execution_stats": {
                    "error_summary": {"hardware": 0, "model": 0, "numerical": 0, "runtime": 0, "transient": 0},
                    "execution_summary": {
                        "completed": 816,
                        "completed_with_err": 0,
                        "completed_with_num_err": 0,
                        "failed_to_queue": 0,
                        "incorrect_input": 0,
                        "timed_out": 0,
                    },
                    "latency_stats": {
                        "device_latency": {"p0": 0.00111, "p50": 0.00112, "p99": 0.00114, "p100": 0.0012}
                    },
                },
            },
        }
    ],
    "system_data": {
        "neuron_hw_counters": {
            "neuron_devices": [
                {
                    "neuron_device_index": 0,
                    "mem_ecc_corrected": 0,
                    "mem_ecc_uncorrected": 0,
                    "sram_ecc_corrected": 0,
                    "sram_ecc_uncorrected": 0,
                }
            ]
        }
    },
}


def differences(value: Any, shape: Any, where: str = "document") -> list[str]:
    """Where a document does not have a shape; empty if it does."""
    if isinstance(shape, tuple):
        found = [differences(value, each, where) for each in shape]
        return min(found, key=len)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where} is not a list"]
        return [each for number, own in enumerate(value) for each in differences(own, shape[0], f"{where}[{number}]")]
    if isinstance(shape, type):
        is_right = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        return [] if is_right else [f"{where} is {type(value).__name__}, not {shape.__name__}"]
    if not isinstance(value, dict):
        return [f"{where} is not a table"]
    if "*" in shape:
        return [each for name, own in value.items() for each in differences(own, shape["*"], f"{where}.{name}")]
    known = {name.removesuffix("?"): own for name, own in shape.items()}
    missing = [f"{where}.{name} is missing" for name in shape if not name.endswith("?") and name not in value]
    unknown = [f"{where}.{name} is unknown" for name in value if name not in known]
    deeper = [
        each
        for name, own in value.items()
        if name in known
        for each in differences(own, known[name], f"{where}.{name}")
    ]
    return [*missing, *unknown, *deeper]
