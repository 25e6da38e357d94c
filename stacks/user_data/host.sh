# A host that cannot be set up does not join the ECS cluster, so that no job starts on it without its network or its data.
# What failed is on the console, which EC2's GetConsoleOutput returns.

report() {
    echo "nxpipe: $1" >&2
    { echo "nxpipe: $1" >> "$CONSOLE"; } 2> /dev/null || true
}

give_up() {
    local code=$?
    trap - ERR
    report "this host cannot be set up and does not join the cluster: line $1 ended with $code"
    systemctl mask --now --runtime ecs.service
    exit "$code"
}
trap 'give_up $LINENO' ERR
