# Whatever fails from here on gives the instance up at once: its group tries another one, and need not wait until the
# lifecycle hook's time is over. What failed is on the console, which EC2's GetConsoleOutput returns.

report() {
    echo "nxpipe: $1" >&2
    { echo "nxpipe: $1" >> "$CONSOLE"; } 2> /dev/null || true
}

about_me() {
    local service=http://169.254.169.254/latest token
    token=$(curl -sSf --max-time 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$service/api/token")
    curl -sSf --max-time 5 -H "X-aws-ec2-metadata-token: $token" "$service/meta-data/$1"
}

give_up() {
    local code=$?
    trap - ERR
    report "this instance cannot be set up: line $1 ended with $code"
    abandon || report "the instance is not abandoned; hook $HOOK does that when the fleet's ready_within is over"
    exit "$code"
}
trap 'give_up $LINENO' ERR

abandon() {
    aws autoscaling complete-lifecycle-action --region "$REGION" --lifecycle-action-result ABANDON \
        --lifecycle-hook-name "$HOOK" --instance-id "$(about_me instance-id)" \
        --auto-scaling-group-name "$(about_me tags/instance/aws:autoscaling:groupName)"
}

require() {
    local program missing=0
    for program; do
        if ! command -v "$program" > /dev/null; then
            report "this image has no $program on the PATH of root; use an image that has it"
            missing=1
        fi
    done
    return "$missing"
}

put() {
    mkdir -p "$(dirname "$1")"
    printf '%s' "$2" > "$1"
}
